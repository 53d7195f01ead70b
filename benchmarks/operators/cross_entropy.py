"""Cross-entropy benchmarks against torch, Hugging Face, torch.compile, TRL and, on GPUs, Liger.

Cross entropy of logits is memory-bound: the figure that matters is the fraction of copy bandwidth.
With the head's matmul it is compute-bound, and it saves memory: about four times the logits. Shapes
are (rows, classes), and (rows, hidden, classes).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops
import fusedops.functional as ours
from benchmarks.harness.case import (
    BACKWARD,
    FORWARD,
    TRAINING,
    Case,
    Contender,
    Operation,
    Run,
    calling,
    compiled,
    find,
    gpu_row,
    through_dispatcher,
    traffic,
    with_peers,
)
from benchmarks.harness.goals import Goal
from fusedops.references.cross_entropy import (
    cross_entropy_reference,
    linear_cross_entropy_reference,
    linear_log_probs_reference,
)

Loss = Callable[..., Tensor]
Outputs = tuple[Tensor, Tensor]


# cross_entropy. Hugging Face first copies the logits to float32 (`ForCausalLMLoss`); ours computes
# the same float32 loss without the copy. Plain eager gives a loss in the logits' dtype.


def logits_inputs(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Logits [rows, classes] and their targets."""
    rows, classes = shape
    x = torch.randn(rows, classes, dtype=dtype, device=device, requires_grad=True)
    return x, torch.randint(classes, (rows,), device=device)


def huggingface(x: Tensor, target: Tensor) -> Tensor:
    """Code as in models, on a float32 copy."""
    return F.cross_entropy(x.float(), target)


def contenders(eager: Loss, huggingface: Loss, fused: Loss) -> dict[str, Contender]:
    """Functions of the inputs; models' code also compiled."""
    return {
        "eager": calling(eager),
        "huggingface": calling(huggingface),
        "compile(huggingface)": compiled(calling(huggingface)),
        "fusedops": calling(fused),
    }


def operation(name: str, grad_in_forward: bool = False) -> Operation:
    """Forward reads the logits. Backward reads them again and writes the gradient.

    With grad_in_forward, the forward writes it, and backward moves nothing.
    """
    options = {"dtype": torch.float32}
    fused = partial(ours.cross_entropy, **options, grad_in_forward=grad_in_forward)
    return Operation(
        name,
        logits_inputs,
        partial(cross_entropy_reference, **options),
        traffic(1, 1 if grad_in_forward else 2),
        contenders(F.cross_entropy, huggingface, fused),
    )


PLAIN = operation("cross_entropy")
IN_FORWARD = operation("cross_entropy, grad_in_forward", grad_in_forward=True)


# linear_cross_entropy: three matmuls. torch has had the function since 2.13, and splits the batch
# into chunks if it gets options.


def linear_inputs(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Draws x, the head's weight, and targets."""
    rows, hidden, classes = shape
    x = torch.randn(rows, hidden, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(classes, hidden, dtype=dtype, device=device) / hidden**0.5
    return x, torch.nn.Parameter(weight), torch.randint(classes, (rows,), device=device)


def bytes_moved(mode: str, x: Tensor, weight: Tensor, target: Tensor) -> int:
    """Forward reads both; backward reads them again and writes both gradients."""
    read = x.nbytes + weight.nbytes
    return {FORWARD: read, BACKWARD: 2 * read, TRAINING: 3 * read}[mode]


def flops(mode: str, x: Tensor, weight: Tensor, target: Tensor) -> int:
    """Counts one matmul for the logits and one per gradient."""
    return 2 * len(x) * weight.numel() * {FORWARD: 1, BACKWARD: 2, TRAINING: 3}[mode]


# Code as it is in models.


def linear_lines(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def linear_huggingface(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def torch_linear(chunked: bool) -> Contender:
    """In as many chunks as its options choose, or with all logits."""

    def prepare(x: Tensor, weight: Tensor, target: Tensor) -> Run:
        function = find("torch.nn.functional", "linear_cross_entropy")
        arguments = {"options": find("torch.nn", "LinearCrossEntropyOptions")()} if chunked else {}
        return partial(function, x, weight, target, **arguments)

    return Contender(prepare)


MODELS_CODE = contenders(
    linear_lines, linear_huggingface, partial(ours.linear_cross_entropy, dtype=torch.float32)
)
TORCHS = {"torch": torch_linear(chunked=False), "torch chunked": torch_linear(chunked=True)}
LINEAR = Operation(
    "linear_cross_entropy",
    linear_inputs,
    partial(linear_cross_entropy_reference, dtype=torch.float32),
    bytes_moved,
    {"eager": MODELS_CODE.pop("eager")} | TORCHS | MODELS_CODE,
    flops,
)


# linear_log_probs: three matmuls, four where the backward recomputes the logits. Each contender
# gives the log-probabilities and the entropies, and the gradients of both, as GRPO with an entropy
# bonus needs them.


def log_probs_reference(x: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    options = {"return_entropy": True, "dtype": torch.float32}
    log_probs, entropy, *_ = linear_log_probs_reference(x, weight, target, **options)
    return log_probs, entropy


def trl(x: Tensor, weight: Tensor, target: Tensor) -> Run:
    """Full logits, then TRL's two functions, as its trainers used to compute them."""
    log_softmax = find("trl.trainer.utils", "selective_log_softmax")
    entropy = find("trl.trainer.utils", "entropy_from_logits")

    def run(x: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        logits = F.linear(x, weight).unsqueeze(0)
        log_probs = log_softmax(logits, target.unsqueeze(0))
        return log_probs.squeeze(0).float(), entropy(logits).squeeze(0).float()

    return partial(run, x, weight, target)


def trl_head(x: Tensor, weight: Tensor, target: Tensor) -> Run:
    """The function behind add_fused_lm_head, in tiles of its own size."""
    function = find("trl.kernels.chunked_logprob", "ChunkedLogProbFunction")
    size = find("trl.trainer.utils", "_CHUNKED_LOGPROB_CHUNK_SIZE")
    options = 1.0, size, None, 1.0, ("log_probs", "entropy")

    def run(x: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        log_probs, entropy, *_ = function.apply(x, weight, None, target, *options)
        return log_probs, entropy

    return partial(run, x, weight, target)


def log_probs(x: Tensor, weight: Tensor, target: Tensor) -> Run:
    options = {"return_entropy": True, "dtype": torch.float32}
    return partial(ours.linear_log_probs, x, weight, target, **options)


LOG_PROBS = Operation(
    "linear_log_probs",
    linear_inputs,
    log_probs_reference,
    bytes_moved,
    {
        "trl": Contender(trl),
        "trl fused head": Contender(trl_head),
        "fusedops": Contender(log_probs),
    },
    flops,
)

LLAMA_2, LLAMA_3, FEW = (1024, 32000), (256, 128256), (8, 32000)
HEAD, NARROW_BATCH = (2048, 512, 32000), (512, 1024, 32000)
OF_COMPLETIONS = (512, 1024, 32768)

BF16, F32, HF = torch.bfloat16, torch.float32, "huggingface"

# Left out of calls that take seconds: the first row already shows the result.
SHOWN = ("torch", "torch chunked")


def row(
    operation: Operation,
    mode: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    without: tuple[str, ...] = (),
) -> Case:
    """In float32, Hugging Face's copy is none, and its code is eager's."""
    without += (HF,) if dtype == F32 else ()
    only = tuple(name for name in operation.contenders if name not in without)
    return Case(operation, mode, dtype, shape, only)


ROWS = [
    row(PLAIN, mode, dtype, shape)
    for mode in (FORWARD, TRAINING)
    for dtype in (F32, BF16)
    for shape in (FEW, LLAMA_2, LLAMA_3)
]
ROWS += [row(IN_FORWARD, TRAINING, dtype, LLAMA_2) for dtype in (F32, BF16)]
ROWS += [row(LINEAR, TRAINING, dtype, HEAD) for dtype in (F32, BF16)]
ROWS += [row(LINEAR, TRAINING, dtype, NARROW_BATCH, SHOWN) for dtype in (F32, BF16)]
ROWS += [
    row(LOG_PROBS, mode, dtype, OF_COMPLETIONS)
    for mode in (FORWARD, TRAINING)
    for dtype in (F32, BF16)
]

QUICK_ROWS = [row(PLAIN, mode, dtype, FEW) for mode in (FORWARD, TRAINING) for dtype in (F32, BF16)]
QUICK_ROWS += [row(LINEAR, TRAINING, BF16, (64, 128, 4000))]

MUST_SHOW = [
    Goal(PLAIN, TRAINING, BF16, LLAMA_2, HF, {"default": 6.0}),
    Goal(LINEAR, TRAINING, BF16, HEAD, HF, {"default": 1.0, "keep": 1.0}, of_memory=0.1),
]
MUST_SHOW += [
    Goal(LOG_PROBS, TRAINING, dtype, OF_COMPLETIONS, "trl", {"default": 1.0}, of_memory=0.5)
    for dtype in (F32, BF16)
]


# Small-batch calls.


def token_inputs(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """That many tokens of a model this wide, with as many classes."""
    tokens, hidden = shape
    return LINEAR.inputs((tokens, hidden, hidden), dtype, device)


def through(module: type) -> Contender:
    """Returns a call of the module: its arguments are the loss's options only."""
    return Contender(lambda *inputs: partial(module(), *inputs))


def through_linear(module: type) -> Callable[..., Run]:
    def prepare(x: Tensor, weight: Tensor, target: Tensor) -> Run:
        loss = module(weight.shape[1], weight.shape[0])
        loss.linear.weight = weight
        return partial(loss, x, target)

    return prepare


def launch(operation: Operation, modules: dict[str, Contender], **other) -> Operation:
    """Eager, torch.ops, the short path, and the modules, without a dtype."""
    rows = {
        "eager": operation.contenders["eager"],
        "fusedops torch.ops": through_dispatcher(operation.name),
        "fusedops functional": calling(getattr(ours, operation.name)),
    }
    return replace(operation, contenders=rows | modules, **other)


LOGITS_MODULES = {
    "eager module": through(torch.nn.CrossEntropyLoss),
    "fusedops module": through(fusedops.nn.CrossEntropyLoss),
}
LINEAR_MODULES = {
    "fusedops module": Contender(through_linear(fusedops.nn.LinearCrossEntropyLoss)),
}
if hasattr(torch.nn, "LinearCrossEntropyLoss"):
    theirs = Contender(through_linear(torch.nn.LinearCrossEntropyLoss))
    LINEAR_MODULES = {"eager module": theirs} | LINEAR_MODULES
LOG_PROBS_CALLS = {
    "eager": calling(log_probs_reference),
    "fusedops functional": Contender(log_probs),
}
LAUNCH = [
    launch(PLAIN, LOGITS_MODULES),
    launch(LINEAR, LINEAR_MODULES, inputs=token_inputs),
    replace(LOG_PROBS, contenders=LOG_PROBS_CALLS, inputs=token_inputs),
]


# Rows on a GPU. Large ones use the device's clock. The host's launches dominate rows with few
# tokens and classes, so these use the host's clock. Their forward is also timed as a CUDA graph.
# The graph excludes Liger, which waits for the device to count the targets.
#
# Liger computes the gradient in the forward and writes it over the logits. It gets one copy of
# them, made outside the timing. From the second call on it works on its own output, so its results
# are not checked. Its linear version only reads its inputs, and computes gradients whenever x
# requires them, which evaluation does not.

LIGER = "liger_kernel.transformers.functional"

Copies = dict[int, tuple[Tensor, Tensor]]  # by id of the logits, kept with their copy


def over_copy(copies: Copies, loss: Callable[..., Tensor], x: Tensor, target: Tensor) -> Tensor:
    """x's gradient is the copy's, unchanged, so nothing more is moved."""
    if id(x) not in copies:
        copies[id(x)] = x, x.clone()
    return loss(copies[id(x)][1], target)


def liger(x: Tensor, target: Tensor) -> Run:
    return partial(over_copy, {}, find(LIGER, "liger_cross_entropy"), x, target)


def without_gradients(
    loss: Callable[..., Tensor], x: Tensor, weight: Tensor, target: Tensor
) -> Tensor:
    return loss(x if torch.is_grad_enabled() else x.detach(), weight, target)


def liger_linear(x: Tensor, weight: Tensor, target: Tensor) -> Run:
    loss = find(LIGER, "liger_fused_linear_cross_entropy")
    return partial(without_gradients, loss, x, weight, target)


LARGE, MIDDLE = (8192, 131072), (8192, 32000)
LARGE_HEAD = (8192, 4096, 131072)
SMALL, SMALL_HEAD = ((1, 1024), (16, 1024), (64, 1024)), ((1, 1024, 1024), (64, 1024, 1024))


def case(operation: Operation, mode: str, shape: tuple[int, ...], clock: str) -> Case:
    without = ("torch", "liger") if clock == "graph" else ("torch",)  # "torch" is eager's lines
    only = tuple(name for name in operation.contenders if name not in without)
    return replace(gpu_row(operation, mode, shape, clock), only=only)


LOGITS, LOGITS_IN_FORWARD = (
    with_peers(op, {"liger": Contender(liger, checked=False)}) for op in (PLAIN, IN_FORWARD)
)
HEADS = with_peers(LINEAR, {"liger": Contender(liger_linear)})
FEW_TOKENS = [*((LOGITS, shape) for shape in SMALL), *((HEADS, shape) for shape in SMALL_HEAD)]

GPU_ROWS = [
    case(LOGITS, TRAINING, LARGE, "device"),
    case(LOGITS_IN_FORWARD, TRAINING, LARGE, "device"),
    case(HEADS, TRAINING, LARGE_HEAD, "device"),
    case(LOGITS, FORWARD, LARGE, "device"),
    case(LOGITS, TRAINING, MIDDLE, "device"),
    case(HEADS, FORWARD, LARGE_HEAD, "device"),
    *(case(op, mode, shape, "host") for mode in (FORWARD, TRAINING) for op, shape in FEW_TOKENS),
    *(case(op, FORWARD, shape, "graph") for op, shape in FEW_TOKENS),
]
