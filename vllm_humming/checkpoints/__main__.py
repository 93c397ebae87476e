# SPDX-License-Identifier: Apache-2.0
"""The command line of vllm_humming.checkpoints."""

import argparse
from dataclasses import asdict, fields, replace
from pathlib import Path

from vllm_humming.checkpoints import DEFAULT_SIZES, KINDS, Sizes, write_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_humming.checkpoints", description="Write a small MoE checkpoint."
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--twin", type=Path, help="also write the dequantised model here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drawn", action="store_true", help="random codes and scales: full sizes in seconds, no twin")
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help="default: the kind's own small size")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in asdict(Sizes()) if getattr(args, name) is not None}
    sizes = replace(DEFAULT_SIZES[args.kind], **given)
    write_checkpoint(args.directory, args.kind, twin=args.twin, sizes=sizes, seed=args.seed, drawn=args.drawn)
    print(args.directory)


if __name__ == "__main__":
    main()
