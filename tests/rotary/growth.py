"""A rotary table with gradients for the memory-growth tests in tests/growth."""

from growth.subject import of

from fusedops import functional as F

Q, K, TABLE = (1, 4, 8, 16), (1, 2, 8, 16), (1, 8, 16)

OPERATORS = {
    "rotary_embedding, table with gradients": lambda: of(F.rotary_embedding, Q, K, TABLE, TABLE)
}
