"""The `zs` command. Each part is imported when it is called, so a wrong word costs no time."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# What a shell reports of a program that SIGPIPE ended: 128 + 13.
CLOSED_PIPE_EXIT_CODE = 141

# A path that the user gave is at fault, and the error's text names it.
PATH_ERRORS = (
    *(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError),
    PermissionError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: words after the program name; those of this process by default.

    Returns:
        0; 1 where a checkpoint is not whole, or two differ; 2 where the user gave something wrong,
        with the reason on stderr; 141 where the reader of the output, such as `head`, had gone.
        Training ends the process by itself with 85 where a signal stopped it, with 86 where it
        hung.
    """
    args = _parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE_EXIT_CODE
    except (ValueError, *PATH_ERRORS) as error:
        print(error, file=sys.stderr)
        return 2
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zs", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train from a YAML file; a second start resumes")
    train.add_argument("config", help="file, or name of a packaged one such as tiny.yaml")
    # With a default, argparse does not list them among what is required.
    train.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as optim.lr=3e-4"
    )
    train.set_defaults(run=_train)

    plan = commands.add_parser("plan", help="bytes and seconds of a run, before it is started")
    plan.add_argument("config", help="file, or name of a packaged one such as gpt_20b.yaml")
    plan.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as trainer.devices=4"
    )
    plan.add_argument(
        "--machine",
        choices=("h200", "this"),
        default="h200",
        help="one that was measured, or this one, which is measured once",
    )
    plan.add_argument(
        "--host-share",
        type=float,
        metavar="PART",
        help="of the optimizer state in host memory, 0 to 1; by default 1",
    )
    plan.set_defaults(run=_plan)

    report = commands.add_parser("report", help="versions, devices, links, names and kernels")
    report.set_defaults(run=_report)

    bench = commands.add_parser("bench", help="measure a case beside its rivals")
    bench.add_argument("words", nargs=argparse.REMAINDER, metavar="CASE ...")
    bench.set_defaults(run=_bench)

    data = commands.add_parser("data", help="token files")
    build = data.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "build", help="text or JSON Lines files to one token file"
    )
    build.add_argument("out", type=Path, help="token file to write")
    build.add_argument("inputs", type=Path, nargs="+", help="*.jsonl, or text files")
    build.add_argument("--field", default="text", help="key of the text in JSON Lines")
    build.set_defaults(run=_data_build)

    _add_checkpoint(commands.add_parser("checkpoint", help="checkpoint directories"))
    return parser


def _add_checkpoint(checkpoint: argparse.ArgumentParser) -> None:
    actions = checkpoint.add_subparsers(required=True, metavar="COMMAND")
    verify = actions.add_parser("verify", help="whether it is what was written")
    verify.add_argument("directory", type=Path, help="checkpoint directory")
    verify.add_argument("--deep", action="store_true", help="read every byte")
    verify.set_defaults(run=_checkpoint_verify)
    compare = actions.add_parser("diff", help="what two of them hold that differs")
    compare.add_argument("one", type=Path, help="checkpoint directory")
    compare.add_argument("other", type=Path, help="checkpoint directory")
    compare.set_defaults(run=_checkpoint_diff)
    convert = actions.add_parser("convert", help="one from another program's, to resume from")
    # No paths, which would hide that a source is a URL.
    convert.add_argument("source", help="of torch.distributed.checkpoint, Lightning or DeepSpeed")
    convert.add_argument("target", type=Path, help="checkpoint directory to write")
    convert.add_argument(
        "--from",
        dest="kind",
        choices=("dcp", "lightning", "deepspeed"),
        help="what the source is; by default its files tell",
    )
    convert.add_argument("--weights-only", action="store_true", help="leave optimizer states out")
    convert.add_argument(
        "--stored-dtypes",
        action="store_true",
        help="keep what DeepSpeed cast to 16 bits so; by default it becomes float32",
    )
    convert.add_argument(
        "--unsafe-pickle",
        action="store_true",
        help="run what the source says to run, as a program that you trust",
    )
    convert.set_defaults(run=_checkpoint_convert)
    export = actions.add_parser("export", help="one file for other programs")
    export.add_argument("directory", type=Path, help="checkpoint directory")
    export.add_argument("out", type=Path, help="*.ckpt or *.safetensors")
    export.set_defaults(run=_checkpoint_export)


def _train(args: argparse.Namespace) -> None:
    from zero_strategy.experiments.config import load_config

    config = load_config(args.config, args.overrides)
    # Only a checked configuration gets as far as Lightning.
    from zero_strategy.experiments.train import train

    train(config)


def _plan(args: argparse.Namespace) -> None:
    from zero_strategy.experiments.config import load_config
    from zero_strategy.experiments.plan import plan

    config = load_config(args.config, args.overrides)
    print(plan(config, machine=args.machine, host_share=args.host_share))


def _report(args: argparse.Namespace) -> None:
    from zero_strategy.experiments.report import report

    print(report())


def _bench(args: argparse.Namespace) -> None:
    from zero_strategy.experiments.benchmarks.run import main as run_benchmark

    run_benchmark(args.words)


def _data_build(args: argparse.Namespace) -> None:
    from zero_strategy.data.build import build_token_file

    tokens = build_token_file(args.out, args.inputs, field=args.field)
    print(
        f"{args.out}: {len(tokens.ids):,} tokens, {tokens.num_documents:,} documents, "
        f"{tokens.num_bytes:,} bytes of text"
    )


def _checkpoint_verify(args: argparse.Namespace) -> int:
    from zero_strategy.checkpoint.verify import verify
    from zero_strategy.telemetry import text

    verdict = verify(args.directory, deep=args.deep)
    for problem in verdict.problems:
        print(f"{args.directory}: {problem}")
    if verdict.problems:
        return 1
    how = "every byte" if args.deep else "manifest and sizes; --deep reads every byte"
    size = text.gib(verdict.num_bytes)
    print(f"{args.directory}: whole, {verdict.num_tensors} tensors, {size} ({how})")
    return 0


def _checkpoint_diff(args: argparse.Namespace) -> int:
    from zero_strategy.checkpoint.diff import diff

    lines = list(diff(args.one, args.other))
    print("\n".join(lines) or "equal, every bit")
    return 1 if lines else 0


def _checkpoint_convert(args: argparse.Namespace) -> None:
    from zero_strategy.checkpoint.convert import convert
    from zero_strategy.telemetry import text

    done = convert(
        args.source,
        args.target,
        kind=args.kind,
        weights_only=args.weights_only,
        stored_dtypes=args.stored_dtypes,
        unsafe_pickle=args.unsafe_pickle,
    )
    size = text.gib(done.num_bytes)
    print(f"{args.target}: from {done.kind}, {done.num_tensors} tensors, {size}")
    for note in done.notes:
        print(f"  {note}")


def _checkpoint_export(args: argparse.Namespace) -> None:
    from zero_strategy.checkpoint.export import export

    export(args.directory, args.out)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
