"""The command line: `fusedops`, or `python -m fusedops`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import fusedops
from fusedops import building

MEMORY = """\
Predicts the bytes of a step's tensors per rank. For one rank on a CPU it adds what else the process
holds: libraries, and what the allocator keeps. "resident" is the largest value that top shows. Not
counted: the data loader's workers, the data set, autocast's copies, buffers between ranks, a GPU's
context, and what an operator allocates and frees within its call."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fusedops", description=fusedops.__doc__)
    parser.add_argument("--version", action="version", version=fusedops.__version__)
    commands = parser.add_subparsers(metavar="command", required=True)
    command = commands.add_parser(
        "info", help="versions, devices, and which backend each operator uses"
    )
    command.set_defaults(run=_info)
    command = commands.add_parser(
        "doctor",
        help="check the compiler, torch, the CPU, threads and CUDA, and print fixes",
    )
    command.set_defaults(run=_doctor)
    command = commands.add_parser("build", help="compile the kernels for the installed torch")
    command.add_argument(
        "--jobs", type=int, help="compilers to run at a time (default: by CPUs and memory)"
    )
    command.set_defaults(run=_build)
    _add_calibrate(commands.add_parser("calibrate", help="time the kernels on this CPU, once"))
    _add_profile(
        commands.add_parser("profile", help="what limits a training step, and by how much")
    )
    _add_demo(commands.add_parser("demo", help="train a model eager and fused, side by side"))
    _add_memory(
        commands.add_parser(
            "memory", help="predict a step's memory, before it is run", description=MEMORY
        )
    )
    _add_sweep(commands.add_parser("sweep", help="latency and throughput over batch and length"))
    _add_tune(commands.add_parser("tune", help="find settings that make a training step faster"))
    _add_bench(commands.add_parser("bench", help="a model eager, compiled and patched, in a table"))
    return parser.parse_args(argv)


def _add_calibrate(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--families", type=lambda text: text.split(","), help="such as attention (default all)")
    add("--device", default="cpu", help="cpu, the default")
    add("--budget", type=float, default=165, metavar="SECONDS", help="for all families")
    add("--out", metavar="FILE", help="where the table goes (default: the cache folder)")
    command.set_defaults(run=_calibrate)


def _add_memory(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", help="folder, config.json, model type such as llama, or a cached model's name")
    add("--batch", type=int, required=True, help="sequences per rank")
    add("--length", type=int, required=True, help="tokens of a sequence")
    add("--mode", default="train", help="train (default), forward or generate")
    add("--optimizer", default="adamw", help="adamw (default), adamw8bit, sgd or none")
    add("--dtype", help="float32, bfloat16, float16 (default: the config's)")
    add("--checkpoint", action="store_true", help="with activation checkpointing")
    add("--patched", action="store_true", help="with fusedops.patch")
    add("--quantize", help="a format of fusedops.quantize: int8, int4, nf4, fp8")
    add("--lora-rank", type=int, help="train LoRA adapters of this rank")
    add("--world", default="1", help="ranks, or several: 1,2,4,8 (default 1)")
    add("--strategy", default="ddp", help="ddp (default), zero1, zero2, zero3 or fsdp")
    add("--json", nargs="?", const="-", metavar="FILE", help="print JSON, or write it to FILE")
    command.set_defaults(run=_memory)


def _add_demo(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--steps", type=int, help="training steps (default 60)")
    add("--threads", type=int, default=1, help="CPU threads (default 1)")
    add("--out", default="demo", help="folder for demo.png and demo.json (default demo)")
    add("--quick", action="store_true", help="a tiny model, 8 steps")
    command.set_defaults(run=_demo)


def _add_profile(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--model", metavar="NAME", help="a folder, a config.json, a model_type or a cached hub name"
    )
    add("--batch", type=int, default=4, help="sequences of --model's batch (default 4)")
    add("--length", type=int, default=256, help="tokens of a sequence (default 256)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--device", default="cpu", choices=("cpu", "cuda"), help="--model's (default cpu)")
    add("--steps", type=int, default=20, help="steps that are measured (default 20)")
    add("--budget", type=float, default=60.0, help="seconds for experiments (default 60)")
    add(
        "--experiments",
        action=argparse.BooleanOptionalAction,
        help="also try the script's step in other ways, and put everything back (default: ask)",
    )
    add("--trace", metavar="FILE", help="judge a trace of torch.profiler, of steps on a GPU")
    add("--json", metavar="FILE", help="write the report there")
    add("--html", metavar="FILE", help="write the report there")
    add("script", nargs="?", help="a training script, which runs as it is")
    add("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    command.set_defaults(run=_profile)


def _add_sweep(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _add_model(command)
    add("--batch", type=_numbers, default=[1, 2, 4, 8, 16], help="sizes (default 1,2,4,8,16)")
    add("--length", type=_numbers, default=[256], help="tokens of a sequence (default 256)")
    add(
        "--variants",
        type=lambda text: text.split(","),
        default=["eager", "patched"],
        help="such as eager,patched,compiled+patched,quantized:nf4 (default eager,patched)",
    )
    add("--p95", type=float, help="seconds: name the best row within this budget")
    add("--past-knee", action="store_true", help="go on where throughput stops growing")
    add("--plot", metavar="FILE", help="write latency against throughput there")
    command.set_defaults(run=_sweep)


def _add_bench(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    command.add_argument("--batch", type=int, default=4, help="sequences (default 4)")
    command.add_argument("--length", type=int, default=256, help="tokens of each (default 256)")
    command.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(default cpu)")
    command.set_defaults(run=_bench)


def _add_tune(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", help="folder, config.json, model type such as llama, or a cached model's name")
    add("--batch", type=int, default=8, help="samples of an optimizer step (default 8)")
    add("--length", type=int, default=256, help="tokens of a sequence (default 256)")
    add("--goal", default="throughput", choices=("throughput", "latency"))
    add("--p95", type=float, help="seconds that 95 %% of the steps may take")
    add("--memory", type=int, help="bytes that a step may hold at its peak")
    add("--knobs", type=lambda text: text.split(","), help="names, in order (default all)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--budget", type=float, default=600.0, help="seconds for everything (default 600)")
    add("--json", metavar="FILE", help="write the trials there")
    command.set_defaults(run=_tune)


def _add_model(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", help="folder, config.json, model type such as llama, or a cached model's name")
    add("--mode", default="train", choices=("train", "forward", "generate"))
    add("--new-tokens", type=int, default=32, help="that --mode generate makes (default 32)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--budget", type=float, default=300.0, help="seconds for all points (default 300)")
    add("--json", metavar="FILE", help="write the rows there")


def _numbers(text: str) -> list[int]:
    """Reads 1,2,4."""
    return [int(part) for part in text.split(",")]


def _info(args: argparse.Namespace) -> int:
    print(fusedops.env_report())
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from fusedops import doctor

    return doctor.run()


def _build(args: argparse.Namespace) -> int:
    try:
        library = building.build_in_cache(args.jobs)
    except (OSError, RuntimeError) as error:
        print(f"fusedops build: {error}", file=sys.stderr)
        return 1
    print(f"compiled {library}")
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    from fusedops.measuring.arguments import check_folders

    try:
        check_folders("calibrate", out=args.out)
        path = Path(args.out) if args.out else None
        print(
            fusedops.calibrate(args.families, device=args.device, path=path, budget_s=args.budget)
        )
    except (OSError, ValueError, RuntimeError) as error:
        text = str(error).removeprefix("calibrate: ")
        print(f"fusedops calibrate: {text}", file=sys.stderr)
        return 1
    return 0


def _profile(args: argparse.Namespace) -> int:
    from fusedops.measuring.arguments import check_folders
    from fusedops.profiling import command

    if sum(given is not None for given in (args.script, args.model, args.trace)) != 1:
        inputs = "a script, --model NAME or --trace FILE, and one of them"
        print(f"fusedops profile: needs {inputs}", file=sys.stderr)
        return 2
    ended: SystemExit | None = None
    try:
        if args.script is None:  # a script may make the folder
            check_folders("profile", json=args.json, html=args.html)
        if args.script is not None:
            report, ended = command.profile_script(
                args.script, args.arguments, args.steps, args.experiments, args.budget
            )
        elif args.trace is not None:
            report = command.profile_trace(args.trace)
            print(report)
        else:
            sizes = args.batch, args.length, args.steps, args.budget, args.dtype, args.device
            report = command.profile_model(args.model, *sizes)
            print(report)
        if args.json:
            report.save(args.json)
        if args.html:
            report.html(args.html)
        if ended is not None:
            raise ended
    except (OSError, ValueError, RuntimeError, ModuleNotFoundError) as error:
        if not str(error).startswith("profile: "):  # the script's own, whose place is needed
            raise
        print(f"fusedops {error}", file=sys.stderr)
        return 1
    return 0


def _demo(args: argparse.Namespace) -> int:
    from fusedops import demo

    options = {"threads": args.threads, "out": args.out, "quick": args.quick}
    return _reported("demo", lambda: demo.run(steps=args.steps, **options))


def _memory(args: argparse.Namespace) -> int:
    from fusedops.profiling.planning import command

    return _reported("memory", lambda: command.run(args))


def _sweep(args: argparse.Namespace) -> int:
    from fusedops.sweeping import command

    return _reported("sweep", lambda: command.sweep_model(args))


def _bench(args: argparse.Namespace) -> int:
    from fusedops.sweeping import command

    return _reported("bench", lambda: command.bench(args))


def _tune(args: argparse.Namespace) -> int:
    from fusedops.tuning import command

    return _reported("tune", lambda: command.tune_model(args))


def _reported(name: str, call: Callable[[], object]) -> int:
    """Runs a command. Prints a user's error, which begins with a command's name and a colon."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError, OSError, ModuleNotFoundError) as error:
        command, _, text = str(error).partition(": ")
        if command not in (name, "sweep"):  # a fault: keep its traceback
            raise
        print(f"fusedops {name}: {text}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen subcommand and returns its exit status."""
    args = parse(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
