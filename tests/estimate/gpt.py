"""The paper's GPTs."""


def gpt_parameters(layers: int, hidden: int, vocab: int) -> int:
    """Parameters of a GPT as the paper counts them: 12·n·h² + V·h (no biases, no norms, one embedding)."""
    return 12 * layers * hidden**2 + vocab * hidden
