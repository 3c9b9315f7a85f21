"""Edge log-probabilities equal one log-softmax per edge, in tiles of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.edge_logprobs import edge_logprobs, logits_logprobs, tiled
from prefix_rewrite.ops.edge_logprobs import head as head_module
from prefix_rewrite.ops.edge_logprobs.head import Head
from prefix_rewrite.ops.edge_logprobs.reference import edge_logprobs_reference
from prefix_rewrite.ops.edge_logprobs.steps import parse_steps

R, D, V, E = 13, 7, 50, 30


@dataclass
class Case:
    """A head, its edges, and what follows the head, in two spellings."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    row: Tensor
    target: Tensor
    temperature: Tensor
    steps: str = ""
    constants: tuple[float, ...] = ()
    after_head: Callable[[Tensor], Tensor] = lambda logits: logits

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The inputs that need a gradient, by its name."""
        named = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {f"grad_{k}": x for k, x in named.items() if x is not None and x.requires_grad}

    def cast(self, dtype: torch.dtype) -> Case:
        """Return the case with leaves of its own, rounded to a dtype."""
        hidden, weight, bias = (
            None if x is None else x.detach().to(dtype).requires_grad_()
            for x in (self.hidden, self.weight, self.bias)
        )
        assert hidden is not None and weight is not None
        return Case(hidden, weight, bias, *list(self.__dict__.values())[3:])


PROGRAMS: dict[str, tuple[str, tuple[float, ...], Callable[[Tensor], Tensor]]] = {
    "plain": ("", (), lambda x: x),
    "granite": ("div", (8.0,), lambda x: x / 8.0),
    "falcon_h1": ("mul", (0.0195,), lambda x: x * 0.0195),
    "softcap": ("div,tanh,mul", (3.0, 3.0), lambda x: torch.tanh(x / 3.0) * 3.0),
    "affine": ("mul,add,sub", (0.5, 1.0, 0.2), lambda x: x * 0.5 + 1.0 - 0.2),
    "two_caps": (
        "tanh,mul,tanh,div",
        (2.0, 0.3),
        lambda x: torch.tanh(torch.tanh(x) * 2.0) / 0.3,
    ),
}


def case(
    program: str = "plain",
    *,
    bias: bool = True,
    sizes: tuple[int, int, int, int] = (R, D, V, E),
    temperature: float = 0.75,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    r, d, v, e = sizes
    hidden, weight, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((1, r, d), (v, d), (v,))
    )
    row, target = (torch.randint(0, n, (e,), generator=generator) for n in (r, v))
    return Case(
        hidden,
        weight,
        b if bias else None,
        row,
        target,
        torch.tensor([temperature]),
        *PROGRAMS[program],
    )


def results(
    case: Case, logprobs: Tensor, entropy: Tensor | None, seed: int = 1
) -> dict[str, Tensor]:
    """Return the outputs and every gradient of a random projection of them, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64)
    named = {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})
    for x in named.values():
        weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        loss = loss + (weights * x.double()).sum()
    leaves = case.leaves
    named |= dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return {name: x.detach().double() for name, x in named.items()}


def run(case: Case, *, entropy: bool = True) -> dict[str, Tensor]:
    logprobs, entropies = edge_logprobs(
        case.hidden,
        case.weight,
        case.bias,
        case.row,
        case.target,
        case.temperature,
        steps=case.steps,
        constants=list(case.constants),
        entropy=entropy,
    )
    assert len(entropies) == (len(case.row) if entropy else 0)
    return results(case, logprobs, entropies if entropy else None)


def run_reference(case: Case, *, entropy: bool = True) -> dict[str, Tensor]:
    exact = case.cast(torch.float64)
    logprobs, entropies = edge_logprobs_reference(
        exact.hidden,
        exact.weight,
        exact.bias,
        case.row.tolist(),
        case.target.tolist(),
        case.temperature.item(),
        case.after_head,
    )
    return results(exact, logprobs, entropies if entropy else None)


def model_logits(case: Case) -> Tensor:
    return case.after_head(F.linear(case.hidden, case.weight, case.bias))


def run_plain(case: Case, *, entropy: bool = True) -> dict[str, Tensor]:
    """The model's own head in its own dtype, then fp32 log-softmax: the yardstick of rounding."""
    logprobs, entropies = logits_logprobs(
        model_logits(case), case.row, case.target, case.temperature, entropy
    )
    return results(case, logprobs, entropies if entropy else None)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, b in expected.items():
        assert got[name].shape == b.shape, name
        error = ((got[name] - b).norm() / b.norm().clamp_min(1.0)).item()
        assert error <= tolerance, f"{name}: error {error:.1e}"


@pytest.fixture(params=[(512, 2**20), (16, 1000), (4, 36)], ids=["one_tile", "tiles", "small"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, logits = request.param
    monkeypatch.setattr(head_module, "TILE_ROWS", rows)
    monkeypatch.setattr(head_module, "MAX_LOGITS_CPU", logits)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_equals_one_log_softmax_an_edge(program: str, bias: bool, entropy: bool) -> None:
    c = case(program, bias=bias)
    assert_close(run(c, entropy=entropy), run_reference(c, entropy=entropy), 1e-12)


@settings(deadline=None, max_examples=30)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 20), st.integers(0, 12)),
    st.sampled_from(list(PROGRAMS)),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 2**32),
)
def test_any_sizes_and_tiles(
    sizes: tuple[int, int, int, int], program: str, rows: int, logits: int, seed: int
) -> None:
    c = case(program, sizes=sizes, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "TILE_ROWS", rows)
        patch.setattr(head_module, "MAX_LOGITS_CPU", logits)
        got = run(c)
    if not len(c.row):
        assert not any(x.any() for x in got.values())
        return
    assert_close(got, run_reference(c), 1e-11)


@pytest.mark.usefixtures("tiles")
def test_float_step_rounds_the_logits_to_fp32_as_the_model_does() -> None:
    c = case()
    c.steps, c.after_head = "mul,float,div", lambda x: (x * 0.3).float() / 0.7
    c.constants = (0.3, 0.7)
    got, plain = run(c), run_plain(c)
    assert (
        edge_logprobs(
            c.hidden,
            c.weight,
            c.bias,
            c.row,
            c.target,
            c.temperature,
            steps=c.steps,
            constants=[0.3, 0.7],
        )[0].dtype
        == torch.float32
    )
    assert_close(got, plain, 1e-6)
    assert not torch.equal(got["logprobs"], run_reference(c)["logprobs"])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("program", PROGRAMS)
def test_fp32_is_exact_to_rounding(program: str) -> None:
    c = case(program).cast(torch.float32)
    assert_close(run(c), run_reference(c), 2e-6)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("program", PROGRAMS)
def test_halves_err_no_more_than_the_model_own_head(program: str, dtype: torch.dtype) -> None:
    c = case(program, sizes=(40, 32, 300, 200)).cast(dtype)
    exact, ours, plain = run_reference(c), run(c), run_plain(c)
    for name, x in exact.items():
        assert (ours[name] - x).norm() <= 1.25 * (plain[name] - x).norm(), name


def test_logprobs_are_fp32_softmax_of_the_half_logits() -> None:
    """A softmax in bf16 would be wrong by about 2 ** -8 of the log-probability."""
    c = case(sizes=(20, 16, 5000, 40), bias=False).cast(torch.bfloat16)
    got = edge_logprobs(c.hidden, c.weight, None, c.row, c.target, c.temperature)[0]
    logits = F.linear(c.hidden.float(), c.weight.float()).bfloat16()[0].float()
    expected = (logits / c.temperature).log_softmax(-1)[c.row, c.target]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("tiles")
def test_autocast_rounds_the_inputs_of_the_head_and_nothing_else() -> None:
    c = case(sizes=(20, 16, 300, 60)).cast(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, plain = run(c), run_plain(c)
        with torch.autocast("cpu", enabled=False):
            assert_close(run(c), run_reference(c), 2e-6)
    for name, x in run_reference(c).items():
        assert (got[name] - x).norm() <= 1.25 * (plain[name] - x).norm(), name
    logprobs, entropy = edge_logprobs(
        c.hidden.bfloat16(), c.weight, c.bias, c.row, c.target, c.temperature, entropy=True
    )
    cast = results(c, logprobs, entropy)
    assert all(torch.equal(got[name], cast[name]) for name in cast)


def test_half_rows_with_an_fp32_head_give_fp32_weight_gradients() -> None:
    c = case().cast(torch.float32)
    hidden = c.hidden.detach().bfloat16().requires_grad_()
    logprobs, _ = edge_logprobs(hidden, c.weight, c.bias, c.row, c.target, c.temperature)
    grads = torch.autograd.grad(logprobs.sum(), (hidden, *list(c.leaves.values())[1:]))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_logits_of_the_model_give_the_same(program: str, entropy: bool) -> None:
    c = case(program)
    assert_close(run_plain(c, entropy=entropy), run_reference(c, entropy=entropy), 1e-12)


@pytest.mark.usefixtures("tiles")
def test_equal_edges_of_opposite_weight_cancel_exactly() -> None:
    c = case()
    c.row, c.target = c.row.repeat(2), c.target.repeat(2)
    logprobs, entropy = edge_logprobs(
        c.hidden, c.weight, c.bias, c.row, c.target, c.temperature, entropy=True
    )
    sign = torch.tensor([1.0, -1.0]).repeat_interleave(E).double()
    grads = torch.autograd.grad((sign * (logprobs + entropy)).sum(), list(c.leaves.values()))
    assert torch.equal(logprobs[:E], logprobs[E:])
    assert not any(g.any() for g in grads)


@pytest.mark.usefixtures("tiles")
def test_a_row_without_edges_gets_no_gradient() -> None:
    c = case()
    keep = c.row != 3
    c.row, c.target = c.row[keep], c.target[keep]
    got = run(c)
    assert not got["grad_hidden"][0, 3].any()
    assert got["grad_hidden"][0, 2].any()


def test_entropy_alone_can_be_the_loss() -> None:
    c = case()
    expected = run_reference(c)["entropy"]
    _, entropy = edge_logprobs(
        c.hidden, c.weight, c.bias, c.row, c.target, c.temperature, entropy=True
    )
    torch.testing.assert_close(entropy, expected, rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(entropy.sum(), c.hidden)
    plain = logits_logprobs(model_logits(c), c.row, c.target, c.temperature, True)[1]
    torch.testing.assert_close(grad, torch.autograd.grad(plain.sum(), c.hidden)[0])


@pytest.mark.parametrize("trains", ["weight", "bias", "neither"])
def test_frozen_head_gives_the_others_their_gradient(
    trains: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = case()
    expected = run_reference(c)
    assert c.bias is not None
    c.weight.requires_grad_(trains == "weight")
    c.bias.requires_grad_(trains == "bias")
    head_trains = []
    backward = tiled.backward

    def spy(*args):
        head_trains.append(args[-1])
        return backward(*args)

    monkeypatch.setattr(tiled, "backward", spy)
    got = run(c)
    assert head_trains == [trains != "neither"]
    assert got.keys() == {name for name in expected if name[5:] in ("hidden", trains)} | {
        "logprobs",
        "entropy",
    }
    assert_close(got, {name: expected[name] for name in got}, 1e-12)


def test_runs_are_repeatable_bit_by_bit() -> None:
    c = case().cast(torch.float32)
    first, second = run(c), run(c)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_is_a_lawful_operator(bias: bool, entropy: bool) -> None:
    c = case("softcap", bias=bias).cast(torch.bfloat16 if bias else torch.float64)
    op = torch.ops.prefix_rewrite.edge_logprobs.default
    inputs = (c.hidden, c.weight, c.bias, c.row, c.target, c.temperature)
    torch.library.opcheck(op, (*inputs, c.steps, list(c.constants), entropy))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_compile_serves_any_rows_and_edges(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()

    def project(c: Case, x: Tensor) -> tuple[Tensor, Tensor]:
        return edge_logprobs(
            torch.sin(x),
            c.weight,
            c.bias,
            c.row,
            c.target,
            c.temperature,
            steps="div,tanh,mul",
            constants=[3.0, 3.0],
            entropy=True,
        )

    compiled = torch.compile(project, backend=backend, dynamic=True, fullgraph=True)
    for step, (rows, edges) in enumerate([(13, 30), (5, 44), (21, 2), (2, 3)]):
        c = case(sizes=(rows, D, V, edges), seed=step)
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            got = results(c, *compiled(c, c.hidden))
        assert_close(got, results(c, *project(c, c.hidden)), 1e-12)


class LargestTensor(TorchDispatchMode):
    """Remember the most elements of any tensor that an op returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_no_tensor_has_more_than_a_tile_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, dim, vocab, edges, budget = 300, 4, 4000, 500, 2**15
    monkeypatch.setattr(head_module, "MAX_LOGITS_CPU", budget)
    c = case("softcap", sizes=(rows, dim, vocab, edges))
    row, order = c.row.sort()
    head = Head(
        c.hidden.detach()[0],
        c.weight.detach(),
        None,
        row,
        c.target[order],
        c.temperature,
        parse_steps(c.steps, list(c.constants)),
    )
    with LargestTensor() as largest:
        logprobs, lse, entropy = tiled.forward(head, True)
        tiled.backward(head, tiled.Saved(lse, entropy, logprobs, entropy), True)
    assert largest.numel <= max(budget, vocab * dim) < rows * vocab


@pytest.mark.parametrize("bad", [-1, V, 10**9])
def test_a_target_out_of_the_vocabulary_is_refused(bad: int) -> None:
    c = case()
    c.target[4] = bad
    with pytest.raises(LayoutError, match=rf"must lie in \[0, {V}\)"):
        edge_logprobs(c.hidden, c.weight, c.bias, c.row, c.target, c.temperature)
    c.target[4] = V - 1
    edge_logprobs(c.hidden, c.weight, c.bias, c.row, c.target, c.temperature)


@pytest.mark.parametrize(
    "steps, constants, message",
    [
        ("exp", [], r"got \['exp'\]"),
        ("mul", [], "take 1 constants, got 0"),
        ("tanh", [1.0], "take 0 constants, got 1"),
    ],
)
def test_an_unknown_program_is_refused(steps: str, constants: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_steps(steps, constants)
    assert len(parse_steps("mul,tanh", [1.0])) == 2
