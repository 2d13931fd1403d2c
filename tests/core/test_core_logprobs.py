import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cleanrl_zoo.core.logprobs import linear_logprobs, token_entropy, token_logprobs


def close(actual, expected, atol=1e-9):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def plain(logits, ids, temperature=1.0):
    """Log-probs and entropies as autograd alone would have them."""
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def random_logits(*shape):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.randint(shape[-1], shape[:-1], generator=generator)


def random_head(rows, width, vocabulary, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (rows,), generator=generator)


def test_token_logprobs_by_hand():
    # logits log(1, 2, 5): probabilities 1/8, 2/8, 5/8. The gradient is 1[chosen] - p.
    logits = torch.tensor([[[1.0, 2.0, 5.0]] * 3], dtype=torch.float64).log().requires_grad_()  # [1, 3, 3]
    logprob = token_logprobs(logits, torch.tensor([[0, 1, 2]]))
    close(logprob.detach(), [[math.log(1 / 8), math.log(2 / 8), math.log(5 / 8)]])
    (logprob * torch.tensor([[1.0, 0.0, -2.0]])).sum().backward()
    close(logits.grad, [[[7 / 8, -2 / 8, -5 / 8], [0, 0, 0], [2 / 8, 4 / 8, -6 / 8]]])
    # temperature 1/2 squares: 1/30, 4/30, 25/30; its gradient is divided by 1/2
    logits.grad = None
    logprob = token_logprobs(logits[:, :1], torch.tensor([[1]]), temperature=0.5)
    close(logprob.detach(), [[math.log(4 / 30)]])
    logprob.sum().backward()
    close(logits.grad[0, 0], [-2 / 30, 2 * 26 / 30, -50 / 30])


def test_token_entropy_by_hand():
    # p = (1/4, 3/4), H = log 4 - 3/4 log 3; d H/d z = -p (log p + H) = -+ 3/16 log 3: -1/4 (-log 4 + H) = 3/16 log 3
    logits = torch.tensor([[[1.0, 3.0]]], dtype=torch.float64).log().requires_grad_()
    entropy = token_entropy(logits)
    close(entropy.detach(), [[math.log(4) - 0.75 * math.log(3)]])
    entropy.sum().backward()
    close(logits.grad, [[[3 / 16 * math.log(3), -3 / 16 * math.log(3)]]])
    # temperature 1/2: odds 1 to 9, H = log 10 - .9 log 9
    close(token_entropy(logits.detach(), temperature=0.5), [[math.log(10) - 0.9 * math.log(9)]])


@pytest.mark.parametrize("chunk", [None, 1, 2, 5, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_any_chunk_equals_log_softmax(chunk, temperature):
    logits, ids = random_logits(3, 5, 7)
    coefficient = torch.linspace(-1, 2, 15, dtype=torch.float64).view(3, 5)
    expected = plain(logits, ids, temperature)
    actual = token_logprobs(logits, ids, temperature, chunk), token_entropy(logits, temperature, chunk)
    for mine, theirs in zip(actual, expected, strict=True):
        close(mine.detach(), theirs.detach())
        (gradient,) = torch.autograd.grad((mine * coefficient).sum(), logits)
        (wanted,) = torch.autograd.grad((theirs * coefficient).sum(), logits, retain_graph=True)
        close(gradient, wanted)


def test_a_slice_of_the_logits_is_as_good():
    logits, ids = random_logits(2, 6, 5)
    for function in (lambda x: token_logprobs(x, ids[:, 2:], 0.5, 2), lambda x: token_entropy(x, 0.5, 2)):
        (gradient,) = torch.autograd.grad(function(logits[:, 1:-1]).square().sum(), logits)
        (wanted,) = torch.autograd.grad(function(logits[:, 1:-1].contiguous()).square().sum(), logits)
        assert torch.equal(gradient, wanted) and gradient[:, 0].abs().max() == 0


def test_an_excluded_token_has_no_probability_and_no_gradient():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    entropy = token_entropy(logits)
    close(entropy.detach(), [math.log(2)])
    logprob = token_logprobs(logits, torch.tensor([0]))
    close(logprob.detach(), [-math.log(2)])
    (3 * entropy + logprob).sum().backward()
    close(logits.grad, [[0.5, -0.5, 0]])


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("needs", ["both", "hidden", "weight"])
def test_gradcheck(entropy, needs):
    hidden, weight, ids = random_head(4, 3, 6)
    hidden.requires_grad_(needs != "weight")
    weight.requires_grad_(needs != "hidden")
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprobs(h, w, ids, temperature=0.7, chunk=3, entropy=entropy), (hidden, weight)
    )
    logits = (hidden @ weight.T).detach().requires_grad_()
    function = (lambda x: token_entropy(x, 0.7, 3)) if entropy else (lambda x: token_logprobs(x, ids, 0.7, 3))
    assert torch.autograd.gradcheck(function, logits)


@pytest.mark.parametrize("chunk", [None, 1, 24])
@pytest.mark.parametrize("uses", ["logprob", "entropy", "both"])
def test_linear_logprobs_equal_log_softmax(chunk, uses):
    # 64 x 20,000 float64 logits are several pieces of the vocabulary
    hidden, weight, ids = random_head(64, 4, 20_000)
    ids[:3] = torch.tensor([0, 19_999, 8_192])

    def loss(logprob, entropy):
        coefficient = torch.linspace(-1, 2, 64, dtype=torch.float64)
        return (uses != "entropy") * (logprob * coefficient).sum() + (uses != "logprob") * entropy.square().sum()

    expected = plain(hidden @ weight.T, ids, 0.8)
    wanted = torch.autograd.grad(loss(*expected), (hidden, weight))
    if uses == "logprob":
        actual = linear_logprobs(hidden, weight, ids, 0.8, chunk), torch.zeros(())
    else:
        actual = linear_logprobs(hidden, weight, ids, 0.8, chunk, entropy=True)
        close(actual[1].detach(), expected[1].detach())
    close(actual[0].detach(), expected[0].detach())
    gradients = torch.autograd.grad(loss(*actual), (hidden, weight))
    for mine, theirs in zip(gradients, wanted, strict=True):
        close(mine, theirs)


def test_only_the_output_that_is_used_needs_a_gradient():
    hidden, weight, ids = random_head(4, 3, 6)
    expected = plain(hidden @ weight.T, ids)
    for used in (0, 1):
        actual = linear_logprobs(hidden, weight, ids, entropy=True)
        gradients = torch.autograd.grad(actual[used].sum(), (hidden, weight))
        wanted = torch.autograd.grad(expected[used].sum(), (hidden, weight), retain_graph=True)
        for mine, theirs in zip(gradients, wanted, strict=True):
            close(mine, theirs)


def test_batches_keep_their_shape():
    hidden, weight, ids = random_head(6, 3, 5)
    flat, flat_entropy = linear_logprobs(hidden, weight, ids, entropy=True)
    logprob, entropy = linear_logprobs(hidden.view(2, 3, 3), weight, ids.view(2, 3), entropy=True)
    assert torch.equal(logprob, flat.view(2, 3)) and torch.equal(entropy, flat_entropy.view(2, 3))
    assert torch.equal(linear_logprobs(hidden.view(2, 3, 3), weight, ids.view(2, 3).int()), logprob)


def test_without_gradients_and_without_rows():
    hidden, weight, ids = random_head(6, 3, 5)
    with torch.no_grad():
        logprob = linear_logprobs(hidden, weight, ids)
        assert not logprob.requires_grad
        close(logprob, plain(hidden @ weight.T, ids)[0])
    logprob, entropy = linear_logprobs(hidden[:0], weight, ids[:0], entropy=True)
    assert logprob.shape == entropy.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros(5, 3, dtype=torch.float64))
    assert torch.equal(hidden.grad, torch.zeros(6, 3, dtype=torch.float64))
    empty = torch.zeros(2, 0, 5, requires_grad=True)
    token_logprobs(empty, torch.zeros(2, 0, dtype=torch.long)).sum().backward()
    assert token_entropy(empty).shape == (2, 0) and empty.grad.shape == (2, 0, 5)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(half):
    hidden, weight, ids = random_head(8, 16, 50, dtype=torch.float32)
    low = hidden.detach().to(half).requires_grad_(), weight.detach().to(half).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in low]
    logprob, entropy = linear_logprobs(*low, ids, chunk=3, entropy=True)
    assert logprob.dtype == entropy.dtype == torch.float32
    wanted = plain(exact[0] @ exact[1].T, ids)
    for mine, theirs in zip((logprob, entropy), wanted, strict=True):
        close(mine.detach().double(), theirs.detach(), atol=1e-5)  # 1,000 times what the products in half would give
    (logprob.sum() + entropy.sum()).backward()
    (wanted[0].sum() + wanted[1].sum()).backward()
    for mine, theirs in zip(low, exact, strict=True):
        assert mine.grad.dtype == half
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=2**-8, atol=1e-5)  # rounded once, at the end
    # logits in half; a head in half under hidden rows in float32
    logits = (low[0] @ low[1].T).detach().requires_grad_()
    logprob = token_logprobs(logits, ids, chunk=3)
    close(logprob.detach().double(), plain(logits.detach().double(), ids)[0], atol=1e-5)
    close(token_entropy(logits.detach(), chunk=3).double(), plain(logits.detach().double(), ids)[1], atol=1e-5)
    logprob.sum().backward()
    assert logits.grad.dtype == half
    assert linear_logprobs(hidden, low[1], ids).dtype == torch.float32


def test_extreme_logits_stay_finite():
    # one token has it all, or two share it: log-probs 0 and -2000, -log 2; never above 0
    hidden = torch.tensor([[1000.0], [-1000.0], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    ids = torch.tensor([0, 0, 0])
    logprob, entropy = linear_logprobs(hidden, weight, ids, entropy=True)
    torch.testing.assert_close(logprob, torch.tensor([0.0, -2000.0, -math.log(2)]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 0.0, math.log(2)]))
    (logprob + entropy).sum().backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
    hidden, weight, ids = random_head(64, 8, 5000, dtype=torch.float32)
    logits = hidden * 30 @ weight.T
    assert (token_logprobs(logits, logits.argmax(-1)) <= 0).all()
    assert (linear_logprobs(hidden * 30, weight, logits.argmax(-1)) <= 0).all()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def test_no_array_of_rows_times_vocabulary_exists():
    hidden, weight, ids = random_head(512, 4, 20_000, dtype=torch.float32)
    with LargestTensor() as seen:
        logprob, entropy = linear_logprobs(hidden, weight, ids, entropy=True)
        (logprob + entropy).sum().backward()
    assert weight.numel() <= seen.elements < 512 * 20_000 / 4


@pytest.mark.parametrize("function", [token_logprobs, lambda logits, ids: token_entropy(logits)])
def test_only_the_logits_themselves_are_kept(function):
    logits, ids = random_logits(2, 300, 5000)  # 24 MB
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        result = function(logits, ids)
    assert kept and all(x.data_ptr() == logits.data_ptr() or x.numel() <= 600 for x in kept)
    constant = logits.detach()
    with LargestTensor() as seen:
        function(constant, ids)
    assert seen.elements <= logits.numel() / 4
    with LargestTensor() as seen:
        result.backward(torch.ones_like(result))
    assert seen.elements == logits.numel()  # the gradient


def test_bad_requests_say_what_is_allowed():
    logits, ids = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    hidden, weight = torch.zeros(2, 3, 4), torch.zeros(5, 4)
    for call in (
        lambda **k: token_logprobs(logits, ids, **k),
        lambda **k: token_entropy(logits, **k),
        lambda **k: linear_logprobs(hidden, weight, ids, **k),
    ):
        with pytest.raises(ValueError, match="temperature is 0"):
            call(temperature=0)
        with pytest.raises(ValueError, match="chunk is 0"):
            call(chunk=0)
    for wrong, message in ((ids + 5, "from 5 to 5; the vocabulary is 0 … 4"), (ids - 100, "from -100 to -100")):
        with pytest.raises(ValueError, match=message):
            token_logprobs(logits, wrong)
        with pytest.raises(ValueError, match=message):
            linear_logprobs(hidden, weight, wrong)
    with pytest.raises(ValueError, match=r"ids \[2\]"):
        token_logprobs(logits, ids[:, 0])
    with pytest.raises(ValueError, match=r"ids \[3\]"):
        linear_logprobs(hidden, weight, ids[0])
    with pytest.raises(ValueError, match=r"give \[..., L, V\]"):
        token_entropy(torch.zeros(5))
    with pytest.raises(ValueError, match=r"weight \[4, 5\]; give \[..., H\] and \[V, H\]"):
        linear_logprobs(hidden, weight.T, ids)
