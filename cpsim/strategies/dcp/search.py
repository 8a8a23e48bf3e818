"""Local search over placements: parts are nodes, or the GPUs of a node; bytes are counted exactly after every move.

A *unit* is a head group of a token block, as queries or as keys. A part that computes on a unit of another part takes
its bytes in and may give some back; what both searches minimize is the sum of squares of what every part receives and
sends, so that traffic is little and even, plus a price on computation beyond a cap.
"""

from __future__ import annotations

import numpy as np

from cpsim.runtime.compiled import bare, compiled, inlined

OUTSIDE = -1
"""Part of a block whose home is no part: another node, where the parts are the GPUs of one."""


@inlined()
def cost_of(received, sent, load, cap, price):  # type: ignore[no-untyped-def]
    """What is minimized: squares of bytes, and ``price`` times the squares of loads beyond ``cap``."""
    cost = 0.0
    for p in range(len(load)):
        over = max(0.0, load[p] - cap)
        cost += received[p] * received[p] + sent[p] * sent[p] + price * over * over
    return cost


@inlined()
def _count(unit, part, sign, home, bytes_in, bytes_out, received, sent):  # type: ignore[no-untyped-def]
    """A part that is not its home begins (+1) or ends (-1) to compute on a unit."""
    received[part] += sign * bytes_in[unit]
    sent[part] += sign * bytes_out[unit]
    if home[unit] != OUTSIDE:
        sent[home[unit]] += sign * bytes_in[unit]
        received[home[unit]] += sign * bytes_out[unit]


@compiled()
def tally(worker, sides, home, bytes_in, bytes_out, area, num_parts):  # type: ignore[no-untyped-def]
    """Users of every unit ``[units, parts]``, and received, sent and load of every part, of a placement."""
    users = np.zeros((len(home), num_parts), np.int64)
    received, sent, load = np.zeros(num_parts), np.zeros(num_parts), np.zeros(num_parts)
    for c in range(len(worker)):
        load[worker[c]] += area[c]
        for side in range(2):
            unit = sides[side, c]
            if users[unit, worker[c]] == 0 and worker[c] != home[unit]:
                _count(unit, worker[c], 1, home, bytes_in, bytes_out, received, sent)
            users[unit, worker[c]] += 1
    return users, received, sent, load


@inlined()
def _leave(units, count, part, users, home, bytes_in, bytes_out, received, sent):  # type: ignore[no-untyped-def]
    """What parts receive and send once a part has ``count`` users fewer of every unit."""
    for unit in units:
        if users[unit, part] == count[unit] and part != home[unit]:
            _count(unit, part, -1, home, bytes_in, bytes_out, received, sent)


@inlined()
def _enter(units, part, users, home, bytes_in, bytes_out, received, sent):  # type: ignore[no-untyped-def]
    """What parts receive and send once a part has users of every unit."""
    for unit in units:
        if users[unit, part] == 0 and part != home[unit]:
            _count(unit, part, 1, home, bytes_in, bytes_out, received, sent)


@bare()
def _gather(members, part, worker, sides, chosen, units, count):  # type: ignore[no-untyped-def]
    """The computation blocks of a bundle that a part has, and their units with how many of them use each; returns how
    many there are of both."""
    size = num_units = 0
    for c in members:
        if worker[c] == part:
            chosen[size] = c
            size += 1
            for side in range(2):
                unit = sides[side, c]
                if count[unit] == 0:
                    units[num_units] = unit
                    num_units += 1
                count[unit] += 1
    return size, num_units


@inlined()
def _frees(units, count, part, users, home):  # type: ignore[no-untyped-def]
    """Whether a part would need some unit of another part no longer."""
    freed = 0
    for unit in units:
        freed += home[unit] != part and users[unit, part] == count[unit]
    return freed > 0


@bare()
def _best_part(units, count, part, weight, state, room, home, bytes_in, bytes_out, cap, price):  # type: ignore[no-untyped-def]
    """Where some computation of a part costs least, which may be that part."""
    users, received, sent, load = state
    received_left, sent_left, received_then, sent_then = room
    best, least = part, cost_of(received, sent, load, cap, price) * (1 - 1e-9)
    for p in range(len(load)):
        received_left[p], sent_left[p] = received[p], sent[p]
    _leave(units, count, part, users, home, bytes_in, bytes_out, received_left, sent_left)
    for to in range(len(load)):
        if to == part:
            continue
        for p in range(len(load)):
            received_then[p], sent_then[p] = received_left[p], sent_left[p]
        _enter(units, to, users, home, bytes_in, bytes_out, received_then, sent_then)
        load[part] -= weight
        load[to] += weight
        cost = cost_of(received_then, sent_then, load, cap, price)
        load[part] += weight
        load[to] -= weight
        if cost < least:
            best, least = to, cost
    return best


@compiled()
def move_bundles(bundle, members, worker, state, sides, home, bytes_in, bytes_out, area, cap, price, sweeps):  # type: ignore[no-untyped-def]
    """Move what a part has of a bundle of computation blocks to where it costs least, bundle by bundle.

    Args:
        bundle, members: ways to bundle, one after the other, ``[ways, C]``: number of a bundle, never falling, and its
            computation blocks.
        worker: part of every computation block; changed.
        state: what ``tally`` counts; changed.
        sides: units of the queries and of the keys of every computation block, ``[2, C]``.
        home: part of every unit, or OUTSIDE.
        bytes_in, bytes_out: of every unit.
        area: load of every computation block.
        cap, price: see ``cost_of``.
        sweeps: over all bundles of a way, at most; fewer once nothing moves.
    """
    chosen_room, units_room = np.empty(len(worker), np.int64), np.empty(2 * len(worker), np.int64)
    room, count = np.empty((4, len(state[3]))), np.zeros(len(home), np.int64)
    has, start = np.zeros(len(state[3]), np.bool_), np.empty(len(worker) + 1, np.int64)
    for way in range(len(bundle)):
        num = 0
        for i in range(len(worker)):
            if i == 0 or bundle[way, i] != bundle[way, i - 1]:
                start[num] = i
                num += 1
        start[num] = len(worker)
        for _ in range(sweeps):
            moved = False
            for i in range(num):
                within = members[way, start[i] : start[i + 1]]
                moved |= _move_bundle(
                    within,
                    worker,
                    state,
                    sides,
                    home,
                    bytes_in,
                    bytes_out,
                    area,
                    cap,
                    price,
                    chosen_room,
                    units_room,
                    room,
                    count,
                    has,
                )
            if not moved:
                break


@bare()
def _move_bundle(  # type: ignore[no-untyped-def]
    within,
    worker,
    state,
    sides,
    home,
    bytes_in,
    bytes_out,
    area,
    cap,
    price,
    chosen_room,
    units_room,
    room,
    count,
    has,
):
    """Move what parts have of one bundle; whether anything moved. What begins with ``chosen_room`` is scratch."""
    users, received, sent, load = state
    moved = False
    has[:] = False
    for c in within:
        has[worker[c]] = True
    for part in range(len(load)):
        if not has[part]:
            continue
        size, num_units = _gather(within, part, worker, sides, chosen_room, units_room, count)
        chosen, units = chosen_room[:size], units_room[:num_units]
        if load[part] > cap or _frees(units, count, part, users, home):
            weight = 0.0
            for c in chosen:
                weight += area[c]
            to = _best_part(units, count, part, weight, state, room, home, bytes_in, bytes_out, cap, price)
            if to != part:
                _leave(units, count, part, users, home, bytes_in, bytes_out, received, sent)
                _enter(units, to, users, home, bytes_in, bytes_out, received, sent)
                for unit in units:
                    users[unit, part] -= count[unit]
                    users[unit, to] += count[unit]
                load[part] -= weight
                load[to] += weight
                for c in chosen:
                    worker[c] = to
                has[to] = moved = True
        for unit in units:
            count[unit] = 0
    return moved


@inlined()
def _change_home(x, to, home, users, row_start, key, nbytes, area, received, sent, load):  # type: ignore[no-untyped-def]
    """A token block and the computation of its queries go to another part."""
    was = home[x]
    load[was] -= area[x]
    load[to] += area[x]
    for at in range(row_start[x], row_start[x + 1]):
        j = key[at]
        owner = home[j]
        users[j, was] -= 1
        if users[j, was] == 0 and was != owner:
            received[was] -= nbytes[j]
            if owner != OUTSIDE:
                sent[owner] -= nbytes[j]
        if users[j, to] == 0 and to != owner:
            received[to] += nbytes[j]
            if owner != OUTSIDE:
                sent[owner] += nbytes[j]
        users[j, to] += 1
    for part in range(len(load)):
        if users[x, part] > 0:
            for at, sign in ((was, -1), (to, 1)):
                if part != at:
                    received[part] += sign * nbytes[x]
                    sent[at] += sign * nbytes[x]
    home[x] = to


@inlined()
def _bring_back(x, was, to, home, users, row_start, key, area, load):  # type: ignore[no-untyped-def]
    """As ``_change_home``, but for what parts receive and send."""
    load[was] -= area[x]
    load[to] += area[x]
    for at in range(row_start[x], row_start[x + 1]):
        users[key[at], was] -= 1
        users[key[at], to] += 1
    home[x] = to


@compiled()
def swap_homes(home, slot, held, most, tokens, row_start, key, nbytes, area, cap, price, pairs, luck):  # type: ignore[no-untyped-def]
    """Swap token blocks of two parts, with the computation of their queries, by simulated annealing.

    Args:
        home: part of every token block, or OUTSIDE; changed.
        slot: rank of every token block, which goes with the place; changed.
        held, most: tokens of every rank, changed; they stay between the fewest of the beginning and ``most`` more.
        tokens: of every block.
        row_start, key: token blocks whose keys the queries of a block see, as CSR.
        nbytes: of the keys and values of every block.
        area: computation of the queries of every block.
        cap, price: see ``cost_of``.
        pairs: token blocks to try, one pair after the other, ``[tries, 2]``, of those with a home.
        luck: uniform numbers in (0, 1] that say which losses are accepted, ``[tries]``.
    """
    fewest = held.min()
    num_parts = home.max() + 1
    users = np.zeros((len(home), num_parts), np.int64)
    received, sent, load = np.zeros(num_parts), np.zeros(num_parts), np.zeros(num_parts)
    for x in range(len(home)):
        if home[x] == OUTSIDE:
            continue
        load[home[x]] += area[x]
        for j in key[row_start[x] : row_start[x + 1]]:
            users[j, home[x]] += 1
    for j in range(len(home)):
        for part in range(num_parts):
            if users[j, part] > 0 and part != home[j]:
                received[part] += nbytes[j]
                if home[j] != OUTSIDE:
                    sent[home[j]] += nbytes[j]
    cost = cost_of(received, sent, load, cap, price)
    best, best_home, best_slot, best_held = cost, home.copy(), slot.copy(), held.copy()
    received_before, sent_before = np.empty(num_parts), np.empty(num_parts)
    for trial in range(len(pairs)):
        x, y = pairs[trial]
        a, b, more = home[x], home[y], tokens[x] - tokens[y]
        at_x, at_y = held[slot[x]] - more, held[slot[y]] + more
        if a == b or min(at_x, at_y) < fewest or max(at_x, at_y) > fewest + most:
            continue
        for p in range(num_parts):
            received_before[p], sent_before[p] = received[p], sent[p]
        _change_home(x, b, home, users, row_start, key, nbytes, area, received, sent, load)
        _change_home(y, a, home, users, row_start, key, nbytes, area, received, sent, load)
        found = cost_of(received, sent, load, cap, price)
        heat = best * 10.0 ** (-2 - 3 * trial / len(pairs))
        if found <= cost or found - cost <= -heat * np.log(luck[trial]):
            cost = found
            held[slot[x]], held[slot[y]] = at_x, at_y
            slot[x], slot[y] = slot[y], slot[x]
            if cost < best:
                best = cost
                best_home[:], best_slot[:], best_held[:] = home, slot, held
        else:
            _bring_back(y, a, b, home, users, row_start, key, area, load)
            _bring_back(x, b, a, home, users, row_start, key, area, load)
            for p in range(num_parts):  # bytes are whole numbers, and what was added is exactly gone
                received[p], sent[p] = received_before[p], sent_before[p]
    home[:], slot[:], held[:] = best_home, best_slot, best_held
