"""``python -m studies.public_steps``: every row, worst first, then each source, and what is left out."""

from __future__ import annotations

from studies.public_steps.compare import QUANTITIES, compared, left_out, summary

UNITS = {"time": (1.0, "s"), "memory": (1e9, "GB")}


def main() -> None:
    """Prints the tables."""
    found = sorted(compared(), key=lambda one: -abs(one.error))
    for one in found:
        scale, unit = UNITS[one.quantity]
        print(
            f"{one.error:+6.1%} {one.quantity:6} {one.today / scale:7.3f} of {one.published / scale:7.3f} {unit:2}  "
            f"{one.row.source}: {one.row.name}"
        )
    print(f"\n{'':24} |   n | today: mean sign worst | said before")
    for source in dict.fromkeys(one.row.group for one in found):
        for quantity in QUANTITIES:
            some = [one for one in found if (one.row.group, one.quantity) == (source, quantity)]
            if some:
                now, then = ([getattr(one, name) for one in some] for name in ("error", "error_before"))
                print(f"{source + ', ' + quantity:24} | {len(some):3} | {summary(now)}   | {summary(then)}")
    print("\nleft out:")
    for (source, reason), count in left_out().items():
        print(f"  {count:3} of {source}: {reason}")


if __name__ == "__main__":
    main()
