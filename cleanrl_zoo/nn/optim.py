"""Adam, RMSprop and the global-norm clip as tensor code, so that one compiled graph holds the whole optimizer step."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def grad_norm(grads: Iterable[Tensor]) -> Tensor:
    """Joint Euclidean norm of `grads`, a scalar."""
    return torch.sqrt(torch.stack([grad.square().sum() for grad in grads]).sum())


def clip_grad_norm(grads: Sequence[Tensor], max_norm: float) -> tuple[list[Tensor], Tensor]:
    """Scales `grads` so that their joint Euclidean norm is at most `max_norm`.

    Returns the scaled gradients and the norm before clipping, a scalar (Pascanu et al., 2013, algorithm 1).
    """
    norm = grad_norm(grads)
    # as_strided, as in Adam below: the compiler stores this number and does not compute it anew for every few elements
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).as_strided((), ())
    return [grad * scale for grad in grads], norm


class Adam:
    """Adam (Kingma & Ba, 2015, algorithm 1) whose step takes gradients and learning rate as tensors.

    The same numbers as `torch.optim.Adam` up to rounding. The step counter is a float64 tensor of shape (1,): compiled
    code drops in-place writes to a 0-dim float64 tensor on the CPU. Bias corrections 1 − βᵗ are −expm1(t·log β), which
    stays exact for large t and needs no Python number that changes from call to call (each would recompile).
    """

    def __init__(
        self, parameters: Iterable[Tensor], beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8
    ) -> None:
        self.parameters = list(parameters)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.exp_avg = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self.exp_avg_sq = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self.steps = torch.zeros(1, dtype=torch.float64, device=self.parameters[0].device)

    def step(self, grads: Sequence[Tensor], learning_rate: Tensor | float) -> None:
        """Moves the parameters in place by one step; `grads` in the order of `parameters`, `learning_rate` a scalar."""
        with torch.no_grad():
            self.steps.add_(1.0)
            dtype = self.parameters[0].dtype
            correction1 = -torch.expm1(self.steps * math.log(self.beta1)).to(dtype)
            correction2 = -torch.expm1(self.steps * math.log(self.beta2)).to(dtype)
            # as_strided makes the compiler store a number; it would compute it anew for every few elements: 4 × slower
            step_size = (learning_rate / correction1).as_strided((1,), (1,))
            root = torch.sqrt(correction2).as_strided((1,), (1,))
            for parameter, grad, m, v in zip(self.parameters, grads, self.exp_avg, self.exp_avg_sq, strict=True):
                m.lerp_(grad, 1.0 - self.beta1)
                v.mul_(self.beta2).addcmul_(grad, grad, value=1.0 - self.beta2)
                parameter.sub_(step_size * m / (v.sqrt() / root + self.eps))

    def state_dict(self) -> dict:
        """Moments and step counter; the parameters themselves belong to their module."""
        return {"steps": self.steps, "exp_avg": list(self.exp_avg), "exp_avg_sq": list(self.exp_avg_sq)}

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` gave, in place, so that compiled code keeps seeing the same tensors."""
        self.steps.copy_(state["steps"])
        for name in ("exp_avg", "exp_avg_sq"):
            for own, saved in zip(getattr(self, name), state[name], strict=True):
                own.copy_(saved)


class RMSprop:
    """RMSprop without centring or momentum (Tieleman & Hinton, 2012), whose step takes tensors as `Adam.step` does.

    v ← αv + (1 − α)g², beginning at 0; θ ← θ − ηg/√(v + ε) with `eps_inside_root`, as Mnih et al. (2016) write it and
    TensorFlow computes it; θ ← θ − ηg/(√v + ε) without, the same numbers as `torch.optim.RMSprop` up to rounding.
    The same ε is not the same optimizer: 1e-5 damps gradients below 3e-3 inside the root, below 1e-5 outside.
    """

    def __init__(
        self, parameters: Iterable[Tensor], alpha: float = 0.99, eps: float = 1e-8, eps_inside_root: bool = True
    ) -> None:
        self.parameters = list(parameters)
        self.alpha, self.eps, self.eps_inside_root = alpha, eps, eps_inside_root
        self.square_avg = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]

    def step(self, grads: Sequence[Tensor], learning_rate: Tensor | float) -> None:
        """Moves the parameters in place by one step; `grads` in the order of `parameters`, `learning_rate` a scalar."""
        with torch.no_grad():
            for parameter, grad, v in zip(self.parameters, grads, self.square_avg, strict=True):
                v.mul_(self.alpha).addcmul_(grad, grad, value=1.0 - self.alpha)
                root = torch.sqrt(v + self.eps) if self.eps_inside_root else v.sqrt() + self.eps
                parameter.sub_(learning_rate * grad / root)

    def state_dict(self) -> dict:
        """Running squares; the parameters themselves belong to their module."""
        return {"square_avg": list(self.square_avg)}

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` gave, in place, so that compiled code keeps seeing the same tensors."""
        for own, saved in zip(self.square_avg, state["square_avg"], strict=True):
            own.copy_(saved)
