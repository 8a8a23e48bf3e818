"""The cluster file of a node that was calibrated, so that scenarios can name it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cpsim.calibrate.measurement import Measurements
from cpsim.calibrate.residuals import flops
from cpsim.case.cluster import Cluster
from cpsim.case.gpu import Gpu, gpu_of_driver
from cpsim.errors import ProfileError
from cpsim.models.profile import Profile


def described(measurements: Measurements, profile: Profile, profile_file: str) -> Cluster:
    """One node with the GPUs of a measurement file.

    Peak FLOP/s and memory bandwidth, which no prediction uses, are the data sheet's where a preset has this GPU, and
    otherwise the best that was measured.
    """
    header = measurements.header
    sheet = gpu_of_driver(header["gpu"])
    rates = [flops(p) / float(np.median(p["samples_s"])) for p in measurements.of("attention")]
    if not sheet and "memory_bytes" not in header:
        raise ProfileError(f"{measurements.source}: says no memory_bytes of {header['gpu']}; use cpsim calibrate")
    if sheet:
        memory = int(header.get("memory_bytes", sheet.memory_bytes))
        gpu = replace(sheet, memory_bytes=memory, num_sms=int(header["num_sms"]))
    else:
        gpu = Gpu(
            name=header["gpu"],
            memory_bytes=int(header["memory_bytes"]),
            num_sms=int(header["num_sms"]),
            peak_flops_per_s=float(f"{max(rates):.3g}"),
            memory_bandwidth_bytes_per_s=float(f"{max(profile.elementwise.bandwidth_bytes_per_s.values()):.3g}"),
        )
    count, port = int(header["num_gpus"]), profile.collective.port_bytes_per_s
    link = f", at most {port / 1e9:.0f} GB/s in and out of each at once" if measurements.of("collective") else ""
    return Cluster(
        name=profile.name,
        gpus_per_node=count,
        num_gpus=count,
        gpu=gpu,
        profile=profile_file,
        notes=f"{count} x {header['gpu']} of one node{link}; {measurements.source}, {header['date'][:10]}",
    )
