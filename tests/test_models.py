"""The models have the published sizes, compute what their papers say, and train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labutils import models

pytestmark = pytest.mark.usefixtures("one_thread")

PUBLISHED = [
    # torchvision's model documentation
    ("resnet18", {}, 11_689_512),
    ("resnet50", {}, 25_557_032),
    ("resnet101", {}, 44_549_160),
    ("resnext50_32x4d", {}, 25_028_904),
    ("resnext101_32x8d", {}, 88_791_336),
    ("vgg16", {}, 138_357_544),
    ("inception_v3", {}, 27_161_264),
    # Hugging Face: BertModel, and BertForQuestionAnswering
    ("bert_base", {"head": "none"}, 109_482_240),
    ("bert_large", {"head": "none"}, 335_141_888),
    ("bert_base", {}, 108_893_186),
    ("bert_large", {}, 334_094_338),
    ("gpt2", {}, 124_439_808),
    ("gpt2_medium", {}, 354_823_168),
    # "#params" in the training log of the paper's own code
    ("transformer_xl_base", {"paper": True}, 151_107_538),
    # the same with NVIDIA's sizes: words, tail clusters, u and v, and 16 layers
    (
        "transformer_xl_base",
        {},
        267_735 * 513 + 3 * 513 + 2 * 512 + 16 * (5 * 512**2 + 2 * 512 * 2048 + 2048 + 5 * 512),
    ),
    # Keras' mnist_mlp, PyTorch's MNIST example, and table 6 of the residual network paper
    ("mlp", {}, 669_706),
    ("small_cnn", {}, 1_199_882),
    ("resnet_small", {}, 269_722),
    ("resnet_small", {"depth": 56}, 853_018),
    ("tiny_layers", {"n": 3, "width": 4, "classes": 2}, 3 * (16 + 4) + 10),
]

GIGA_MACS = {
    # torchvision's model documentation ("GFLOPS", a multiply-add counted once)
    "resnet18": 1.81,
    "resnet50": 4.09,
    "resnet101": 7.80,
    "resnext50_32x4d": 4.23,
    "resnext101_32x8d": 16.41,
    "vgg16": 15.47,
    "inception_v3": 5.71,
}


def on_meta(name: str, **options: object) -> tuple[models.ModelSpec, nn.Module]:
    spec = models.spec(name, **options)
    with torch.device("meta"):
        return spec, spec.build()


def flops(model: nn.Module, *inputs: Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(*inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize(("name", "options", "published"), PUBLISHED)
def test_parameter_count_is_the_published_one(name: str, options: dict, published: int) -> None:
    spec, model = on_meta(name, **options)
    assert models.parameter_count(model) == published
    assert spec.parameters == (None if options else published)


@pytest.mark.parametrize("name", models.names())
def test_forward_and_backward_on_meta_reach_every_parameter(name: str) -> None:
    spec, model = on_meta(name)
    inputs, targets = spec.batch(2, device="meta")
    loss = spec.loss(model, inputs, targets)
    assert loss.shape == ()
    assert loss.device.type == "meta"
    loss.backward()
    # DistributedDataParallel waits for ever for a gradient that does not come.
    assert [key for key, value in model.named_parameters() if value.grad is None] == []
    spec.optimizer(model.parameters()).step()


@pytest.mark.parametrize("name", models.names())
def test_no_tensor_is_left_behind_when_a_replica_moves(name: str) -> None:
    _, model = on_meta(name)
    plain = [
        f"{path}.{key}"
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
    assert plain == []


@pytest.mark.parametrize(("name", "published"), GIGA_MACS.items())
def test_vision_arithmetic_is_the_published_one(name: str, published: float) -> None:
    spec, model = on_meta(name)
    inputs, _ = spec.batch(1, device="meta")
    assert flops(model, *inputs) / 2e9 == pytest.approx(published, abs=0.006)


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "scores"),
    [("bert_large", 24, 1024, 2), ("gpt2", 12, 768, 50257)],
)
def test_language_arithmetic_is_the_formula(
    name: str, layers: int, hidden: int, scores: int
) -> None:
    """24 T D^2 + 4 T^2 D a layer (Narayanan et al. 2021, arXiv:2104.04473, appendix)."""
    seq = 256
    spec, model = on_meta(name)
    inputs, _ = spec.batch(1, seq, device="meta")
    expected = layers * (24 * seq * hidden**2 + 4 * seq**2 * hidden) + 2 * seq * hidden * scores
    assert flops(model, *inputs) == expected


@pytest.mark.parametrize(
    ("name", "parent", "shapes"),
    [
        ("resnet50", "stages", [(256, 56), (512, 28), (1024, 14), (2048, 7)]),
        ("resnext101_32x8d", "stages", [(256, 56), (512, 28), (1024, 14), (2048, 7)]),
        ("resnet18", "stages", [(64, 56), (128, 28), (256, 14), (512, 7)]),
        ("inception_v3", "", [(192, 35), (288, 35), (768, 17), (2048, 8)]),
    ],
)
def test_stages_have_the_shapes_of_the_paper(
    name: str, parent: str, shapes: list[tuple[int, int]]
) -> None:
    spec, model = on_meta(name)
    seen: list[tuple[int, int]] = []
    for child in list(model.get_submodule(parent).children())[:4]:
        child.register_forward_hook(lambda _m, _i, out: seen.append((out.shape[1], out.shape[3])))
    model(*spec.batch(2, device="meta")[0])
    assert seen[:4] == shapes


def test_vgg_halves_the_image_five_times() -> None:
    spec, model = on_meta("vgg16")
    seen = []
    for module in model.modules():
        if isinstance(module, nn.MaxPool2d):
            module.register_forward_hook(lambda _m, _i, out: seen.append(tuple(out.shape[1:])))
    model(*spec.batch(1, device="meta")[0])
    widths = ((64, 112), (128, 56), (256, 28), (512, 14), (512, 7))
    assert seen == [(channels, side, side) for channels, side in widths]


@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp", {}), ("small_cnn", {}), ("tiny_layers", {"n": 20}), ("resnet_small", {"depth": 8})],
)
def test_small_models_learn_a_batch_with_their_own_optimizer(name: str, options: dict) -> None:
    torch.manual_seed(0)
    spec = models.spec(name, **options)
    model = spec.build()
    inputs, targets = spec.batch(16)
    optimizer = spec.optimizer(model.parameters())
    first = spec.loss(model, inputs, targets).item()
    for _ in range(20):
        optimizer.zero_grad()
        spec.loss(model, inputs, targets).backward()
        optimizer.step()
    assert spec.loss(model, inputs, targets).item() < 0.8 * first


def test_inception_adds_its_auxiliary_loss_in_training_only() -> None:
    spec, model = on_meta("inception_v3", classes=7)
    inputs, _ = spec.batch(2, device="meta")
    assert [tuple(out.shape) for out in model(*inputs)] == [(2, 7), (2, 7)]
    assert model.eval()(*inputs).shape == (2, 7)
    scores, targets = torch.randn(4, 7), torch.randint(7, (4,))
    both = spec.criterion((scores, scores), targets)
    torch.testing.assert_close(both, 1.4 * F.cross_entropy(scores, targets))


def test_own_module_is_resolved_like_a_named_one() -> None:
    mine = nn.Linear(5, 2)
    example = (torch.arange(15.0).view(3, 5), torch.tensor([0, 1, 0]))
    spec = models.resolve(mine, example=example)
    inputs, targets = spec.batch(7)
    assert inputs[0][3].equal(example[0][0])
    assert targets.shape == (7,)
    model = spec.build()
    spec.loss(model, inputs, targets).backward()
    assert model is not mine
    assert mine.weight.grad is None
    assert spec.batch(4, device="meta")[0][0].device.type == "meta"
    assert models.resolve("mlp", width=8).build().get_submodule("0").out_features == 8
    adam = models.resolve("mlp", optimizer=torch.optim.Adam).optimizer(mine.parameters())
    assert isinstance(adam, torch.optim.Adam)
    assert models.resolve(spec) is spec


PAIR = torch.ones(3, 2), torch.ones(3)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.create("resnet5"), "did you mean .*resnet50"),
        (lambda: models.create("resnet50", width=3), "no option width; its options are classes"),
        (lambda: models.create("bert_base", head="x"), "head is 'x', but must be"),
        (lambda: models.create("resnet_small", depth=21), "depth is 21"),
        (lambda: models.spec("resnet50").batch(0), "batch is 0"),
        (lambda: models.spec("resnet50").batch(2, seq=8), "does not read tokens"),
        (lambda: models.spec("bert_base").batch(2, seq=513), "at most 512"),
        (lambda: models.spec("gpt2").batch(2, seq=0), "seq is 0"),
        (lambda: models.resolve(nn.Linear(2, 2)), "needs an example batch"),
        (lambda: models.resolve(nn.Linear(2, 2), n=3), "leave out n"),
        (lambda: models.resolve(3), "model is of type int"),  # type: ignore[arg-type]
        (
            lambda: models.resolve(nn.Linear(2, 2), example=(torch.ones(3, 2), torch.ones(2))),
            r"have \[2, 3\] samples",
        ),
        (lambda: models.resolve(nn.LazyLinear(2), example=PAIR), "'weight' has no shape yet"),
        (
            lambda: models.resolve(nn.Linear(2, 2, dtype=torch.cfloat), example=PAIR),
            "'weight' is complex",
        ),
        *(
            (lambda make=make: models.resolve(make(), example=PAIR), message)
            for make, message in (
                (lambda: torch.compile(nn.Linear(2, 2)), "^OptimizedModule is compiled, .* before"),
                (lambda: nn.Sequential(torch.compile(nn.Linear(2, 2))), "Sequential: '0' is comp"),
                (lambda: compiled_in_place(nn.Linear(2, 2)), "^Linear is compiled"),
                (lambda: torch.jit.trace(nn.ReLU(), PAIR[0]), "^TopLevelTracedModule is compiled"),
                (lambda: nn.DataParallel(nn.Linear(2, 2)), r"a wrapper .* pass its \.module"),
            )
        ),
        *(
            (lambda e=e: models.resolve(nn.Linear(2, 2), example=e), r"example is \(inputs, targ")
            for e in ({"x": 1}, torch.ones(2), ({"x": PAIR[0]}, PAIR[1]), (PAIR[0], {"y": 1}))
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_bad_input_is_answered_with_a_sentence(call, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
