"""Writes predictions of a kind of rows, to be committed before their errors are looked at.

python -m studies.public.say KIND said/NAME.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path

from studies.public.ledger import said_line
from studies.public.predict import predict_rows
from studies.public.readers import rows


def main() -> None:
    """One line for every row that can be predicted."""
    kind, path = sys.argv[1:]
    asked = list(rows([kind]))
    found = predict_rows(asked, [(None, kind, i) for i in range(len(asked))])
    lines = [said_line(row, one) for row, one in zip(asked, found, strict=True) if not one.why]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} of {len(asked)} rows")
    for why in dict.fromkeys(one.why for one in found if one.why):
        print(f"  not: {why}")


if __name__ == "__main__":
    main()
