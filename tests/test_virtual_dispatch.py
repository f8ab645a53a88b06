"""Operators on virtual GPUs: CPU's values, CUDA's rules on devices, views that share memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labutils.virtual.tensor import VirtualTensor
from tests.virtual_gpus import gpus, to

MIXED = "Expected all tensors to be on the same device, but found at least two devices"
DEV = "vgpu:1"


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with gpus(4) as module:
        module.set_device(1)
        yield


def long(*values: int, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device)


def changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    made = tensor.clone()
    change(made)
    return made


UNARY = (
    "abs acos asinh atan ceil cos cosh deg2rad digamma erf erfc exp expm1 floor frac "
    "isfinite isnan lgamma log1p logical_not neg positive rad2deg reciprocal relu round "
    "rsqrt sigmoid sign sin sinc sinh sqrt square tan tanh trunc all any amax amin argmax "
    "argmin argsort argwhere count_nonzero max mean median min nanmean nansum nonzero norm "
    "prod std std_mean sum var var_mean clone diagonal flatten fliplr flipud ravel squeeze "
    "t trace tril triu unique unbind zeros_like ones_like msort "
)

# Each takes a float tensor of shape (4, 6) with the values 0 … 23 in some order.
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: getattr(torch, name) for name in UNARY.split()},
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: (x / 10).cumprod(1),
    "cummax": lambda x: x.cummax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(0),
    "sort": lambda x: x.sort(dim=1, descending=True),
    "topk": lambda x: x.topk(2),
    "kthvalue": lambda x: x.kthvalue(3),
    "mode": lambda x: (x // 4).mode(),
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "histc": lambda x: x.histc(5),
    "bincount": lambda x: x.long().view(-1).bincount(),
    "searchsorted": lambda x: torch.searchsorted(x[0].sort()[0], x[1].contiguous()),
    "matmul": lambda x: x @ x.t(),
    "mv": lambda x: x.mv(x[0]),
    "bmm": lambda x: torch.bmm(x[None], x.t()[None]),
    "baddbmm": lambda x: torch.baddbmm(x[None, :, :4], x[None], x.t()[None]),
    "addmm": lambda x: torch.addmm(x[:, :4], x, x.t(), beta=2, alpha=0.5),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([1], [1])),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "kron": lambda x: torch.kron(x[:2], x[2:]),
    "cdist": lambda x: torch.cdist(x, x),
    "inverse": lambda x: torch.linalg.inv(x[:, :4] + 50 * torch.eye(4, device=x.device)),
    "det": lambda x: torch.linalg.det(x[:, :4] + 50 * torch.eye(4, device=x.device)),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.t() + 900 * torch.eye(4, device=x.device)),
    "solve": lambda x: torch.linalg.solve(x[:, :4] + 50 * torch.eye(4, device=x.device), x),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "matrix_rank": lambda x: torch.linalg.matrix_rank(x),
    "fft": lambda x: torch.fft.fft(x),
    "hfft": lambda x: torch.fft.hfft(torch.complex(x, -x)),
    "stft": lambda x: torch.stft(x.view(-1), 8, return_complex=True, window=x[0].new_ones(8)),
    "complex": lambda x: torch.complex(x, x * 2) * (1 + 2j),
    "conj": lambda x: torch.complex(x, x * 2).conj() @ torch.complex(x, x).mT,
    "imag of conj": lambda x: torch.complex(x, x * 2).conj().imag,
    "view_as_real": lambda x: torch.view_as_real(torch.complex(x, x)),
    "polar": lambda x: torch.polar(x, x),
    "pinv complex": lambda x: torch.linalg.pinv(torch.complex(x, x.flip(0))),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "hstack": lambda x: torch.hstack([x, x]),
    "block_diag": lambda x: torch.block_diag(x, x),
    "cartesian_prod": lambda x: torch.cartesian_prod(x[0], x[1]),
    "combinations": lambda x: torch.combinations(x[0]),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "repeat": lambda x: x.repeat(2, 1),
    "tile": lambda x: x.tile(2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "repeat_interleave tensor": lambda x: x.repeat_interleave(long(1, 2, 0, 1, like=x), 0),
    "roll": lambda x: x.roll(1, 0),
    "rot90": lambda x: x.rot90(),
    "flip": lambda x: x.flip(1),
    "pad": lambda x: F.pad(x, (1, 2), value=3.0),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "take": lambda x: x.take(long(1, 3, like=x)),
    "index cpu": lambda x: x[torch.tensor([1, 2])],
    "index device": lambda x: x[long(1, 2, like=x), long(0, 5, like=x)],
    "index lists": lambda x: x[[0, 1], [1, 2]],
    "index mask": lambda x: x[x > 5],
    "index cpu mask": lambda x: x[torch.tensor([True, False, True, False])],
    "index none": lambda x: x[None, ..., 1:5:2],
    "index negative": lambda x: x[-1],
    "masked_select": lambda x: x.masked_select(x > 3),
    "masked_fill": lambda x: x.masked_fill(x > 3, 0.0),
    "where": lambda x: torch.where(x > 5, x, 0.0),
    "gather": lambda x: x.gather(1, long(0, 1, 2, like=x)[None]),
    "scatter": lambda x: x.scatter(1, long(0, 1, 2, like=x)[None], 9.0),
    "scatter_add": lambda x: x.scatter_add(1, long(0, 1, 1, like=x)[None], x),
    "scatter_reduce": lambda x: x.scatter_reduce(1, long(0, 1, like=x)[None], x, "amax"),
    "index_add": lambda x: x.index_add(0, long(0, 0, like=x), x[:2]),
    "index_copy": lambda x: x.index_copy(0, long(3, 0, like=x), x[:2]),
    "index_fill": lambda x: x.index_fill(0, long(3, 0, like=x), 7.0),
    "index_select": lambda x: x.index_select(1, long(3, 0, like=x)),
    "index_put": lambda x: x.index_put((torch.tensor([0, 1]),), torch.tensor(7.0)),
    "set item": lambda x: changed(x, lambda t: t.__setitem__((slice(None), 1), 3.0)),
    "set row": lambda x: changed(x, lambda t: t.__setitem__(0, t[1])),
    "set mask": lambda x: changed(x, lambda t: t.__setitem__(t > 3, 1.0)),
    "set from cpu": lambda x: changed(x, lambda t: t.__setitem__(0, torch.ones(6))),
    "one_hot": lambda x: F.one_hot(x[0].long()),
    "clamp": lambda x: x.clamp(3, 9),
    "lerp": lambda x: x.lerp(x.flip(0), 0.3),
    "addcmul": lambda x: x.addcmul(x, x, value=0.1),
    "pow": lambda x: x**2 + 2**x,
    "remainder": lambda x: x % 5,
    "bitwise": lambda x: x.int() & 5 | 2,
    "compare": lambda x: (x > 3) ^ (x <= 9),
    "scalar cpu tensor": lambda x: x * torch.tensor(2.0),
    "type promotion": lambda x: x.int() + 1.5,
    "bfloat16": lambda x: (x.bfloat16() * 3).float(),
    "arange": lambda x: torch.arange(5, device=x.device),
    "linspace": lambda x: torch.linspace(0, 1, 7, device=x.device),
    "new_full": lambda x: x.new_full((2,), 3.0),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "full_like": lambda x: torch.full_like(x, 3.0),
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float64),
    "type_as": lambda x: torch.ones(2).type_as(x),
    "new": lambda x: x.new([1.0, 2.0]),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "t_": lambda x: changed(x, lambda t: t.t_()),
    "squeeze_": lambda x: changed(x[None], lambda t: t.squeeze_(0)),
    "unsqueeze_": lambda x: changed(x, lambda t: t.unsqueeze_(1)),
    "transpose_": lambda x: changed(x, lambda t: t.transpose_(0, 1)),
    "resize_ smaller": lambda x: changed(x, lambda t: t.resize_(2, 2)),
    "set_": lambda x: changed(x, lambda t: t.set_(x[1:])),
    "as_strided": lambda x: x.as_strided((3, 2), (2, 1), 1),
    "as_strided_": lambda x: changed(x, lambda t: t.as_strided_((3, 2), (2, 1), 1)),
    "data": lambda x: changed(x, lambda t: setattr(t, "data", x[:2])),
    "add_": lambda x: changed(x, lambda t: t.add_(1).mul_(t)),
    "zero_": lambda x: changed(x, lambda t: t[1].zero_()),
    "copy_": lambda x: changed(x, lambda t: t.copy_(x[0])),
    "out": lambda x: torch.add(x, x, out=torch.empty_like(x)),
    "out grows": lambda x: torch.add(x, x, out=x.new_empty(0)),
    "out two": lambda x: torch.max(x, 1, out=(x.new_empty(0), x.new_empty(0, dtype=torch.long))),
    "channels_last": lambda x: x.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
}  # fmt: skip


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in leaves(v)] if isinstance(value, list | tuple) else []


def plain_input() -> torch.Tensor:
    return torch.arange(24.0)[torch.arange(24) * 7 % 24].view(4, 6)


@pytest.mark.parametrize("name", CALLS)
def test_equals_cpu_and_tracks_sharing(name: str) -> None:
    on_cpu = plain_input()
    x = on_cpu.to(DEV)
    expected, got = leaves(CALLS[name](on_cpu)), leaves(CALLS[name](x))
    assert len(expected) == len(got)
    assert expected
    for want, have in zip(expected, got):
        assert type(have) is VirtualTensor
        assert have.index == 1
        assert (have.shape, have.stride(), have.dtype) == (want.shape, want.stride(), want.dtype)
        assert have.raw.shape == have.shape
        assert have.raw.stride() == have.stride()
        torch.testing.assert_close(have.cpu(), want, equal_nan=True)
        storage = have.raw.untyped_storage()
        shares = storage.data_ptr() == x.raw.untyped_storage().data_ptr()  # type: ignore[attr-defined]
        assert shares == (have.block is x.block)  # type: ignore[attr-defined]
        assert shares == (
            want.untyped_storage().data_ptr() == on_cpu.untyped_storage().data_ptr()
        ) or name in ("imag of conj", "data", "set_")
        assert have.block.nbytes == storage.nbytes()
    torch.testing.assert_close(x.cpu(), on_cpu)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1],
        lambda x: x.view(-1),
        lambda x: x.t(),
        lambda x: x.expand(2, 4, 6),
        lambda x: x.split(2)[1],
        lambda x: x.chunk(2, 1)[0],
        lambda x: x.unbind(0)[2],
        lambda x: x.detach(),
        lambda x: x.data,
        lambda x: x.narrow(0, 1, 2),
        lambda x: x.diagonal(),
        lambda x: x.reshape(6, 4),
        lambda x: x.unfold(1, 2, 2),
        lambda x: x.movedim(0, 1),
        lambda x: x.view(torch.int32),
    ],
)
def test_writing_through_a_view_writes_the_base(view: Callable[..., torch.Tensor]) -> None:
    on_cpu = plain_input()
    x = on_cpu.to(DEV)
    view(on_cpu).zero_()
    view(x).zero_()
    assert torch.equal(x.cpu(), on_cpu)
    assert (on_cpu == 0).any()


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(1)[0],
    "prod": lambda x: x.prod(),
    "trace": lambda x: x.trace(),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:2], 0, 1, 3),
    "put": lambda x: x.put(torch.tensor([1, 2], device=x.device), x[0, :2]),
    "sgn": lambda x: torch.sgn(x) * x,
    "only zeros": lambda x: torch.sgn(x),
    "mvlgamma": lambda x: torch.mvlgamma(x + 5, 2),
    "index": lambda x: x[torch.tensor([0, 0, 1])] ** 2,
    "mask": lambda x: x[x > 3] ** 2,
    "cat": lambda x: torch.cat([x, x * 2]).pow(2),
    "polar": lambda x: torch.view_as_real(torch.polar(x, x)).pow(2),
    "norm": lambda x: x.norm() * x,
    "cdist": lambda x: torch.cdist(x, x.flip(0)),
    "pad": lambda x: F.pad(x[None, None], (1, 1, 1, 1), mode="reflect").pow(2),
    "grid": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bicubic").pow(2),
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "triu": lambda x: x.triu() @ x.t(),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_equals_cpu(name: str) -> None:
    on_cpu = (plain_input() / 7 + 0.3).requires_grad_()
    x = to(on_cpu, DEV)
    GRADIENTS[name](on_cpu).sum().backward()
    GRADIENTS[name](x).sum().backward()
    assert on_cpu.grad is not None
    assert type(x.grad) is VirtualTensor
    torch.testing.assert_close(x.grad.cpu(), on_cpu.grad)


IMAGES, ROWS = (2, 3, 8, 8), (2, 5, 8)
MODULES: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "conv1d": (lambda: nn.Conv1d(5, 4, 3), [ROWS]),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), [IMAGES]),
    "conv3d": (lambda: nn.Conv3d(3, 4, 3), [(2, 3, 5, 5, 5)]),
    "depthwise": (lambda: nn.Conv2d(3, 6, 3, groups=3), [IMAGES]),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), [IMAGES]),
    "batch norm": (lambda: nn.BatchNorm2d(3), [IMAGES]),
    "group norm": (lambda: nn.GroupNorm(1, 3), [IMAGES]),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), [IMAGES]),
    "layer norm": (lambda: nn.LayerNorm(8), [ROWS]),
    "rms norm": (lambda: nn.RMSNorm(8), [ROWS]),
    "dropout off": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)), [ROWS]),
    "max pool": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.MaxPool2d(2)), [IMAGES]),
    "average pool": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.AvgPool2d(2)), [IMAGES]),
    "adaptive": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(3)), [IMAGES]),
    "upsample": (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Upsample(scale_factor=2, mode="bilinear")),
        [IMAGES],
    ),
    "pixel shuffle": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.PixelShuffle(2)), [IMAGES]),
    "lstm": (lambda: nn.LSTM(8, 5, 2, bidirectional=True, batch_first=True), [ROWS]),
    "lstm without biases": (lambda: nn.LSTM(8, 5, bias=False), [ROWS]),
    "gru": (lambda: nn.GRU(8, 5, 2), [ROWS]),
    "rnn": (lambda: nn.RNN(8, 5), [ROWS]),
    "lstm cell": (lambda: nn.LSTMCell(8, 5), [(2, 8)]),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2
        ),
        [ROWS],
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(
            nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2
        ),
        [ROWS, ROWS],
    ),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True), [ROWS, ROWS]),
    "attention": (lambda: nn.MultiheadAttention(8, 2), [ROWS, ROWS, ROWS]),
    "embedding": (lambda: nn.Embedding(10, 4, padding_idx=0), [torch.randint(0, 10, (3, 5))]),
    "bag": (lambda: nn.EmbeddingBag(10, 4), [torch.randint(0, 10, (3, 5))]),
    "bilinear": (lambda: nn.Bilinear(8, 8, 3), [ROWS, ROWS]),
    "activations": (
        lambda: nn.Sequential(
            nn.Linear(8, 8), nn.GELU(), nn.SiLU(), nn.ELU(), nn.PReLU(), nn.Softplus(), nn.GLU()
        ),
        [ROWS],
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), [ROWS]),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), [ROWS]),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), [ROWS]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_module_equals_cpu(name: str) -> None:
    torch.manual_seed(0)
    make, shapes = MODULES[name]
    plain = make()
    model = copy.deepcopy(plain).to(DEV)
    inputs = [
        s if isinstance(s, torch.Tensor) else torch.randn(s, requires_grad=True) for s in shapes
    ]
    copies = [to(x, DEV) for x in inputs]
    outputs = []
    for module, arguments in ((plain, inputs), (model, copies)):
        torch.manual_seed(1)
        out = leaves(module(*arguments))[0]
        out.pow(2).sum().backward()
        outputs.append(out)
    torch.testing.assert_close(outputs[1].cpu(), outputs[0], atol=1e-5, rtol=1e-4)
    ours, theirs = [*model.parameters(), *copies], [*plain.parameters(), *inputs]
    assert any(b.grad is not None for b in theirs)
    for a, b in zip(ours, theirs):
        if b.grad is not None:
            assert a.grad is not None
            torch.testing.assert_close(a.grad.cpu(), b.grad, atol=1e-4, rtol=1e-4)
    for a, b in zip(model.buffers(), plain.buffers()):
        torch.testing.assert_close(a.cpu(), b)


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mse": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "l1": lambda x: F.l1_loss(x, torch.zeros_like(x)),
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x)),
    "kl": lambda x: F.kl_div(x.log_softmax(-1), x.detach().softmax(0)),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "cross entropy": lambda x: F.cross_entropy(
        x, long(0, 1, 2, 3, like=x), label_smoothing=0.1, ignore_index=1
    ),
    "nll": lambda x: F.nll_loss(x.log_softmax(1), long(0, 1, 2, 3, like=x)),
    "triplet": lambda x: F.triplet_margin_loss(x, x + 1, x - 2),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(0)).sum(),
    "ctc, lengths on the CPU": lambda x: F.ctc_loss(
        x[:, None].log_softmax(-1),
        torch.tensor([[1, 2]]).to(x.device),
        torch.tensor([4]),
        torch.tensor([2]),
    ),
    "ctc, lengths on the device": lambda x: F.ctc_loss(
        x[:, None].log_softmax(-1), long(1, 2, like=x)[None], long(4, like=x), long(2, like=x)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_loss_equals_cpu(name: str) -> None:
    on_cpu = (plain_input() / 9).requires_grad_()
    x = to(on_cpu, DEV)
    expected, got = LOSSES[name](on_cpu), LOSSES[name](x)
    expected.backward()
    got.backward()
    torch.testing.assert_close(got.cpu(), expected)
    torch.testing.assert_close(x.grad.cpu(), on_cpu.grad)


def test_packed_sequences_equal_cpu() -> None:
    lengths = torch.tensor([6, 4, 2])
    model, x = nn.LSTM(4, 5, batch_first=True), torch.randn(3, 6, 4)

    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        assert packed.batch_sizes.device.type == "cpu"
        return nn.utils.rnn.pad_packed_sequence(module(packed)[0], batch_first=True)[0]

    got = run(copy.deepcopy(model).to(DEV), x.to(DEV))
    torch.testing.assert_close(got.cpu(), run(model, x))


def test_causal_attention_with_dropout_runs() -> None:
    x = torch.randn(2, 2, 8, 4, device=DEV, requires_grad=True)
    F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.1).sum().backward()
    assert x.grad is not None


def two() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(3, 3, device="vgpu:0"), torch.ones(3, 3, device="vgpu:1"), torch.ones(3, 3)


WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda a, b, c: a + b,
    "matmul": lambda a, b, c: a @ b,
    "cat": lambda a, b, c: torch.cat([a, b]),
    "cat with cpu": lambda a, b, c: torch.cat([a, c]),
    "cpu first": lambda a, b, c: c + a,
    "into cpu": lambda a, b, c: c.add_(a),
    "from cpu": lambda a, b, c: a.add_(c),
    "index": lambda a, b, c: a[torch.tensor([0], device="vgpu:1")],
    "cpu with device index": lambda a, b, c: c[torch.tensor([0], device="vgpu:0")],
    "index_put values": lambda a, b, c: a.index_put((torch.tensor([0]),), torch.ones(3)),
    "linear": lambda a, b, c: F.linear(c, a),
    "conv": lambda a, b, c: F.conv2d(c[None, None], a[None, None]),
    "embedding": lambda a, b, c: F.embedding(torch.tensor([0]), a),
    "cross entropy": lambda a, b, c: F.cross_entropy(a, torch.zeros(3, dtype=torch.long)),
    "batch norm": lambda a, b, c: F.batch_norm(a, torch.zeros(3), torch.ones(3)),
    "out": lambda a, b, c: torch.add(a, a, out=c),
    "one element, one dimension": lambda a, b, c: a + torch.ones(1),
    "scalar of another device": lambda a, b, c: a + torch.ones((), device="vgpu:1"),
    "lstm": lambda a, b, c: nn.LSTM(3, 3).to("vgpu:0")(c),
    "gradient": lambda a, b, c: (a.requires_grad_() * 2).backward(b),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mixed_devices_are_refused_in_cudas_words(name: str) -> None:
    with pytest.raises(RuntimeError, match=MIXED):
        WRONG[name](*two())


def test_mixed_devices_names_both() -> None:
    a, b, _ = two()
    with pytest.raises(RuntimeError, match=r"vgpu:0 and vgpu:1! .*add.*\.to\('vgpu:0'\)"):
        a + b


def test_sparse_is_refused_with_a_way_out() -> None:
    with pytest.raises(RuntimeError, match="dense tensors only"):
        torch.eye(3, device=DEV).to_sparse()
    with pytest.raises(RuntimeError, match="dense tensors only"):
        torch.eye(3).to_sparse().to(DEV)
    table = nn.Embedding(3, 3, sparse=True).to(DEV)
    with pytest.raises(RuntimeError, match="sparse=False"):
        table(torch.tensor([1], device=DEV)).sum().backward()


def test_function_transforms_equal_cpu() -> None:
    from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

    def f(v: torch.Tensor) -> torch.Tensor:
        return (v.sin() * v).sum()

    def along(v: torch.Tensor) -> torch.Tensor:
        return jvp(f, (v,), (torch.ones_like(v),))[1]

    def pulled(v: torch.Tensor) -> torch.Tensor:
        return vjp(f, v)[1](torch.ones((), device=v.device))[0]

    x = torch.randn(4)
    for transform in (grad(f), hessian(f), jacrev(f), jacfwd(f), along, pulled, vmap(torch.exp)):
        torch.testing.assert_close(transform(x.to(DEV)).cpu(), transform(x))
    rows = torch.randn(3, 4)
    torch.testing.assert_close(vmap(grad(f))(rows.to(DEV)).cpu(), vmap(grad(f))(rows))


def test_ensemble_with_stacked_parameters() -> None:
    from torch.func import functional_call, stack_module_state, vmap

    models = [nn.Linear(4, 2).to(DEV) for _ in range(3)]
    x = torch.randn(4, device=DEV)
    parameters, buffers = stack_module_state(models)
    got = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(got, torch.stack([m(x) for m in models]))


OPTIMIZERS = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    *[
        (name, {})
        for name in ("Adam", "AdamW", "RMSprop", "Adagrad", "LBFGS", "NAdam", "RAdam", "Adadelta")
    ],
    ("Adamax", {}),
    *[(n, {"foreach": True}) for n in ("SGD", "Adam", "RMSprop")],
    *[(n, {"foreach": False}) for n in ("SGD", "Adam", "RMSprop")],
    *[(n, {"fused": True}) for n in ("Adam", "AdamW", "Adagrad")],
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_optimizer_equals_cpu(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(3, 2)]
    models.append(copy.deepcopy(models[0]).to(DEV))
    kind = getattr(torch.optim, name)
    for model in models:
        optimizer = kind(model.parameters(), lr=0.01, **options)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            x = torch.arange(6.0).view(2, 3).to(next(model.parameters()).device)
            loss: torch.Tensor = model(x).pow(2).sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            return loss

        for _ in range(3):
            optimizer.step(closure)
    for a, b in zip(models[1].parameters(), models[0].parameters()):
        torch.testing.assert_close(a.cpu(), b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_equals_cpu(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))]
    models.append(copy.deepcopy(models[0]).to(DEV))
    x = torch.randn(3, 4)
    for model in models:
        place = next(model.parameters()).device
        checkpoint(model, x.to(place).requires_grad_(), use_reentrant=reentrant).sum().backward()
    for a, b in zip(models[1].parameters(), models[0].parameters()):
        assert a.grad is not None
        torch.testing.assert_close(a.grad.cpu(), b.grad)


def test_checkpointing_repeats_dropout() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(1000, device=DEV, requires_grad=True)
    out = checkpoint(F.dropout, x, 0.5, True, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_dropout_keeps_the_expected_share() -> None:
    x = torch.ones(10_000, device=DEV)
    kept = float((F.dropout(x, 0.3) > 0).float().mean())
    assert abs(kept - 0.7) < 0.05
    assert torch.equal(F.dropout(x, 0.3, training=False), x)


def test_helpers_of_training() -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(DEV)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), vector * 2)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    with torch.no_grad():
        model[0].weight.zero_()
    averaged.update_parameters(model)
    half = (vector * 2)[:16].view(4, 4) / 2
    torch.testing.assert_close(averaged.module[0].weight, half)
    update_bn([torch.randn(3, 4)], averaged, device=torch.device(DEV))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
