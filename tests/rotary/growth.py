"""rotary_embedding calls for the memory-growth tests in tests/growth."""

from growth.subject import Subject, fixed, leaf

from fusedops import functional as F


def rotary(unsqueeze_dim=1, table=fixed, **options):
    def run(q, k, cos, sin):
        return F.rotary_embedding(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **options)

    q, k = ((1, 4, 8, 16), (1, 2, 8, 16)) if unsqueeze_dim == 1 else ((1, 8, 4, 16), (1, 8, 2, 16))
    return Subject(run, lambda: [leaf(*q), leaf(*k), table(1, 8, 16), table(1, 8, 16)])


OPERATORS = {
    "rotary_embedding": lambda: rotary(),
    "rotary_embedding, interleaved": lambda: rotary(2, interleaved=True),
    "rotary_embedding, table with gradients": lambda: rotary(table=leaf),
}  # fmt: skip
