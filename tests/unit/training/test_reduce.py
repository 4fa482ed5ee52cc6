"""Parts of sparse reduction that need no second process."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphstash import ConfigError
from graphstash.training.reduce import SparseState, Thresholding, report, sparse_hook
from graphstash.training.reduce.blocks import BlockView, block_elements, layout_of
from graphstash.training.reduce.ddp_hook import DensityGate
from graphstash.training.reduce.opening import Form, _require_possible

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]
WITHOUT_INDEX = [torch.float8_e5m2, torch.uint16, torch.uint64]


@st.composite
def flats(draw):
    """A mostly zero tensor and a block size."""
    dtype = draw(st.sampled_from(DTYPES))
    elements = draw(st.integers(0, 70))
    flat = torch.zeros(elements, dtype=dtype)
    values = [1, 3, *([-1, -2.5, math.nan, math.inf, -0.0] if dtype.is_floating_point else [])]
    if not dtype.is_floating_point:
        values += [torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    for place in draw(st.lists(st.integers(0, max(0, elements - 1)), max_size=6)):
        if elements:
            flat[place] = draw(st.sampled_from(values))
    return flat, draw(st.integers(1, 20))


def cut(flat, size, lengths):
    """Return the blocks of each part in order."""
    parts = flat.split(lengths)
    return [block for part in parts if len(part) for block in part.split(size)]


@given(flats(), st.data())
def test_blocks_of_parts_are_found_packed_written_added_and_cleared(given_, data):
    flat, size = given_
    ends = sorted(data.draw(st.lists(st.integers(0, len(flat)), max_size=3)))
    lengths = [end - start for start, end in zip([0, *ends], [*ends, len(flat)], strict=True)]
    parts = [*zip([0, *ends], [*ends, len(flat)], strict=True)]
    view = BlockView(flat, size, parts=parts)
    expected = cut(flat, size, lengths)
    assert view.nonzero().tolist() == [bool(block.ne(0).any()) for block in expected]
    numbers = data.draw(st.sets(st.integers(0, max(0, view.count - 1))))
    chosen = torch.tensor(sorted(numbers) if view.count else [], dtype=torch.int64)
    packed = view.pack(chosen)
    assert len(packed) == sum(len(expected[number]) for number in chosen)
    copy, twice, rest = torch.zeros_like(flat), flat.clone(), flat.clone()
    BlockView(copy, size, parts=parts).unpack(chosen, packed)
    BlockView(twice, size, parts=parts).add(chosen, packed)
    BlockView(rest, size, parts=parts).clear(chosen)
    found = zip(expected, *(cut(each, size, lengths) for each in (copy, twice, rest)), strict=True)
    for number, (block, *blocks) in enumerate(found):
        is_chosen, zeros = number in chosen, torch.zeros_like(block)
        wanted = (block, block + block, zeros) if is_chosen else (zeros, block, block)
        for one, other in zip(blocks, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_blocks_fit_rows_of_tables_and_start_with_large_parameters():
    def table(rows, width):
        return torch.empty(rows, width)

    widths = [1, 3, 24, 64, 256, 300, 768, 1021]
    sizes = [block_elements(table(2000, width)) for width in widths]
    assert sizes == [1, 3, 24, 64, 256, 150, 256, 1021]
    others = [table(1023, 64), torch.empty(10**6), torch.empty(64, 2000).t(), torch.empty(2000, 0)]
    assert [*map(block_elements, others)] == [256] * 4
    small = [table(5, 3), torch.empty(7), torch.empty(0, 4)]
    assert layout_of(small) == ((256, ((0, 22),)),)
    mixed = [small[0], table(2000, 64), *small[1:], small[0], table(1024, 96), table(1024, 64)]
    after, end = 128_015, 128_037 + 1024 * 96
    assert layout_of(mixed) == (
        (64, ((15, after), (end, end + 65_536))),
        (96, ((128_037, end),)),
        (256, ((0, 15), (after, 128_037))),
    )
    assert layout_of(mixed, 1000) == ((1000, ((0, end + 65_536),)),)
    assert layout_of([]) == ()


def test_tables_of_many_widths_share_the_blocks_of_other_parameters():
    """Each width costs a count in a message of at least 128 bytes."""
    layout = layout_of([torch.empty(1024 + width, width) for width in range(1, 12)])
    assert [size for size, _ in layout] == [*range(5, 12), 256]


def test_zero_neighbours_of_nonzero_rows_are_not_sent():
    """With blocks that straddled two rows behind an odd parameter, 509 rows occupied 764 blocks."""
    odd, rows = torch.zeros(65), torch.zeros(2000, 64)
    rows[torch.randperm(2000)[:509]] = 1
    flat = torch.cat([odd, rows.view(-1)])
    views = [BlockView(flat, size, parts=parts) for size, parts in layout_of([odd, rows])]
    assert [int(view.nonzero().sum()) for view in views] == [509, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_nonzero_blocks_are_found_in_tensor_scanned_in_pieces(dtype):
    flat = torch.zeros(3 * 2**20 + 5, dtype=dtype)
    places = [0, 2**19 - 1, 2**19, 2**20 + 300, 2**21, len(flat) - 6, len(flat) - 1]
    flat[places] = 1
    found = BlockView(flat, 256).nonzero()
    assert found.nonzero().flatten().tolist() == sorted({place // 256 for place in places})


@pytest.mark.parametrize("one_zero", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.complex64, torch.complex128),
    ],
    ids=str,
)
def test_negative_zero_is_zero_and_loses_its_sign_on_request(dtype, one_zero):
    flat = torch.full((18,), complex(-0.0, -0.0) if dtype.is_complex else -0.0, dtype=dtype)
    flat[4], flat[9], flat[13] = 2, -3, math.nan  # blocks of four elements; the last block has two
    blocks = BlockView(flat, 4)
    assert blocks.nonzero(one_zero=one_zero).tolist() == [False, True, True, True, False]
    signs = (torch.view_as_real(flat)[:, 0] if dtype.is_complex else flat).signbit()
    assert signs[[0, 3, 16, 17]].tolist() == [not one_zero] * 4
    assert signs[[5, 8, 12]].tolist() == [True] * 3


@pytest.mark.parametrize("size", [1, 3, 64, 300])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.bool, *WITHOUT_INDEX], ids=str)
def test_nonzero_blocks_are_found_among_zeros_and_negative_zeros(dtype, size):
    flat, expected = torch.zeros(100 * 256 + 7, dtype=dtype), set()
    is_signed = dtype.is_floating_point and dtype not in WITHOUT_INDEX
    for place, value in ((0, 1), (700, -0.0), (701, 1), (9000, -0.0), (20_000, math.nan)):
        if is_signed or dtype.is_complex or value == 1:
            flat[place] = value
            expected |= {place // size} if value != 0 else set()
    found = BlockView(flat, size).nonzero(one_zero=True)
    assert found.nonzero().flatten().tolist() == sorted(expected)
    if is_signed:
        assert [bool(flat[place].signbit()) for place in (700, 9000)] == [size > 1, False]


def test_blocks_of_a_parameter_are_written_to():
    parameter = nn.Parameter(torch.ones(10))
    blocks = BlockView(parameter, 4)
    chosen = torch.tensor([1, 2])
    blocks.unpack(chosen, 2 * blocks.pack(chosen))
    assert parameter.tolist() == [1] * 4 + [2] * 6


@given(flats(), st.data())
def test_only_selected_blocks_are_zeroed(given_, data):
    flat, size = given_
    blocks = BlockView(flat, size)
    flags = data.draw(st.lists(st.booleans(), min_size=blocks.count, max_size=blocks.count))
    parts = flat.clone().split(size) if len(flat) else ()
    blocks.zero_(torch.tensor(flags, dtype=torch.bool))
    for before, after, is_zero in zip(parts, flat.split(size), flags, strict=False):
        wanted = torch.zeros_like(before) if is_zero else before
        torch.testing.assert_close(after, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [-1, 5])
def test_rank_that_announces_impossible_numbers_of_blocks_is_named(count):
    _require_possible([[0], [4]], [Form(4, 16)])
    with pytest.raises(RuntimeError, match=rf"rank 1 announces \[{count}\] blocks"):
        _require_possible([[0], [count]], [Form(4, 16)])


def test_a_gate_becomes_dense_and_sparse_at_different_densities():
    gate = DensityGate(dense_above=0.7, sparse_below=0.5)
    seen = []
    for density in (0.1, 0.69, 0.71, 0.6, 0.51, 0.5, 0.69):
        while gate.skips():
            pass
        gate.record(density)
        seen.append(gate.is_dense)
    assert seen == [False, False, True, True, True, False, False]


def test_dense_gate_checks_density_ever_more_rarely():
    gate = DensityGate(dense_above=0.7, sparse_below=0.5, longest=8)
    looks = []
    for number in range(40):
        if not gate.skips():
            looks.append(number)
            gate.record(1.0)
    assert looks == [0, 2, 5, 10, 19, 28, 37]


@pytest.mark.parametrize(("above", "below"), [(0.5, 0.6), (1.1, 0.5), (0.5, -0.1)])
def test_limits_that_contradict_each_other_are_refused(above, below):
    with pytest.raises(ValueError, match=rf"sparse_below={below}.*dense_above={above}"):
        DensityGate(dense_above=above, sparse_below=below)


def test_blocks_of_another_size_get_another_threshold():
    """DDP changes its buckets after the first step, and a checkpoint may have other buckets."""
    model = nn.Linear(400, 1, bias=False)
    changing, fresh = (Thresholding(model, keep=0.2, largest_error=1) for _ in range(2))
    first, second = gradients_of(2)
    changing.hold_back_(model.weight, first.clone(), block_size=100)
    changing._held["weight"].zero_()
    for each in (changing, fresh):
        gradient = second.clone()
        each.hold_back_(model.weight, gradient, block_size=8)
        assert BlockView(gradient, 8).nonzero().sum() == 10


def gradients_of(steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(50, generator=generator).repeat_interleave(8)
    return [torch.randn(400, generator=generator) * scales for _ in range(steps)]


def test_held_back_blocks_are_sent_later():
    model = nn.Linear(400, 1, bias=False)
    thresholding = Thresholding(model, keep=0.2, refresh_every=3, largest_error=1)
    given_, sent = torch.zeros(400), torch.zeros(400)
    for gradient in gradients_of(20):
        given_ += gradient
        thresholding.hold_back_(model.weight, gradient, block_size=8)
        sent += gradient
        assert (BlockView(gradient, 8).nonzero()).sum() < 50
    waiting = thresholding.waiting(model.weight)
    torch.testing.assert_close(sent + waiting, given_, rtol=1e-5, atol=1e-5)
    assert waiting.norm() > 0


@given(st.floats(0, 1), st.integers(0, 5))
@settings(max_examples=30)
def test_held_back_amount_is_bounded(largest_error, seed):
    model = nn.Linear(400, 1, bias=False)
    thresholding = Thresholding(model, keep=0.05, refresh_every=4, largest_error=largest_error)
    for gradient in gradients_of(8, seed):
        whole = gradient + thresholding.waiting(model.weight)
        thresholding.hold_back_(model.weight, gradient, block_size=8)
        waits = thresholding.waiting(model.weight).norm()
        assert waits <= largest_error * whole.norm() * 1.0001


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_blocks_are_never_held_back(bad):
    model = nn.Linear(400, 1, bias=False)
    thresholding = Thresholding(model, keep=0.02, largest_error=1)
    for number, gradient in enumerate(gradients_of(4)):
        gradient[17] = bad if number == 2 else 1e-6
        thresholding.hold_back_(model.weight, gradient, block_size=8)
        assert gradient.isfinite().all() == (number != 2)
        assert thresholding.waiting(model.weight).isfinite().all()


def test_unused_parameter_keeps_held_back_blocks():
    model = nn.Linear(400, 1, bias=False)
    thresholding = Thresholding(model, keep=0.2, refresh_every=2, largest_error=0.9)
    (gradient,) = gradients_of(1)
    thresholding.hold_back_(model.weight, gradient, block_size=8)
    waiting = thresholding.waiting(model.weight).clone()
    assert waiting.norm() > 0
    for _ in range(3):
        unused = torch.zeros(400)
        thresholding.hold_back_(model.weight, unused, block_size=8)
        assert not unused.any()
        assert torch.equal(thresholding.waiting(model.weight), waiting)
    later = gradients_of(2)[1]
    thresholding.hold_back_(model.weight, later, block_size=8)
    assert (later == 0).any()  # the threshold is still one


def test_gradient_with_infinity_sets_finite_threshold():
    model = nn.Linear(400, 1, bias=False)
    thresholding = Thresholding(model, keep=0.2, refresh_every=100, largest_error=1)
    for number, gradient in enumerate(gradients_of(3)):
        if number == 0:
            gradient[17] = math.inf
        thresholding.hold_back_(model.weight, gradient, block_size=8)
        assert gradient.any()


def test_empty_and_strided_parameters_hold_nothing_back():
    model = nn.Module()
    model.empty = nn.Parameter(torch.zeros(0))
    model.image = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last).weight
    thresholding = Thresholding(model)
    thresholding.hold_back_(model.empty, torch.zeros(0), block_size=8)
    assert thresholding.waiting(model.image).shape == (36,)


def test_a_parameter_of_another_model_is_named():
    with pytest.raises(ValueError, match=r"shape \[1, 2\] is not of the model"):
        Thresholding(nn.Linear(3, 1)).waiting(nn.Linear(2, 1).weight)


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ({"weight": torch.ones(7)}, "7 elements of 'weight', and this model has 6"),
        ({"module.weight": torch.ones(6)}, "and this model has no such parameter"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(held, text):
    state = {"held": held, "thresholds": {}, "steps": {}}
    with pytest.raises(ValueError, match=text):
        Thresholding(nn.Linear(3, 2)).load_state_dict(state)


@pytest.mark.parametrize(
    "gradients", [(torch.ones(4),), (torch.ones(4), torch.ones(2)), ((torch.ones(4), "w"),)]
)
def test_argument_that_is_no_ddp_bucket_is_refused(gradients):
    """FSDP and compiled autograd do not pass a bucket.

    FSDP calls a hook with the gradient and a tensor for the shard; compiled autograd passes a
    tuple.
    """
    with pytest.raises(
        ConfigError, match=r"got a (Tensor|tuple) and no bucket of gradients, as FS"
    ):
        sparse_hook(object.__new__(SparseState), *gradients)


@pytest.mark.parametrize(
    ("argument", "value"), [("keep", 0), ("keep", 1.5), ("refresh_every", 0), ("largest_error", 2)]
)
def test_thresholding_refuses_options_out_of_range(argument, value):
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        Thresholding(nn.Linear(2, 1), **{argument: value})


def embedding():
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(10_000, 64), nn.Linear(64, 1))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(0, 10_000, (8, 4), generator=generator),) for _ in range(count)]


def loss(model, batch):
    return model(*batch).square().mean()


def test_report_recommends_sparse_reduction_for_embedding():
    model = embedding()
    before = [parameter.clone() for parameter in model.parameters()]
    forecast = report(model, batches(9), loss=loss, workers=4, link_gbits=1)
    # Each batch uses 32 of 10,000 rows, and a block is a row.
    assert 0.003 < forecast.density < 0.0035
    assert 3 < forecast.union_density / forecast.density < 4
    total = sum(parameter.nbytes for parameter in before)
    assert forecast.dense_seconds == pytest.approx(1.5 * total * 8 / 1e9)
    assert 145 < forecast.times_faster < 160
    assert forecast.densities["1.weight"] == 1
    assert str(forecast).startswith("sparse reduction would pay: 0.3%")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, model.parameters(), before))


def test_report_needs_one_batch_per_worker():
    rest = iter(batches(5))
    model = embedding()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    forecast = report(model, rest, loss=lambda m, b: loss(m, b) + m.empty.sum(), workers=3)
    assert len(list(rest)) == 2
    assert forecast.density > 0


def test_report_counts_batches_in_which_a_parameter_is_frozen():
    model = nn.Linear(64, 64, bias=False)
    other = nn.Parameter(torch.ones(()))

    def loss_of(module, batch):
        module.weight.requires_grad_(batch[0] > 0)
        return (module(torch.ones(1, 64)) * other).sum()

    model.register_parameter("other", other)
    forecast = report(model, [(0,), (1,), (1,)], loss=loss_of, workers=3)
    assert forecast.densities == {"weight": pytest.approx(2 / 3), "other": 1}


def test_report_counts_parameter_without_gradient_as_zeros():
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(3)])
    model[2].requires_grad_(False)
    routed = [(number, torch.ones(1, 64)) for number in (0, 1)]
    forecast = report(model, routed, loss=lambda m, b: m[b[0]](b[1]).sum(), workers=2)
    assert forecast.densities == {"0.weight": 0.5, "1.weight": 0.5}
    assert (forecast.density, forecast.union_density) == (0.5, 1)


def test_report_advises_against_sparse_reduction_of_dense_model():
    model = nn.Linear(100, 100)
    forecast = report(model, [(torch.ones(1, 100),)] * 2, loss=loss, workers=2)
    assert forecast.union_density == 1
    assert forecast.times_faster < 1
    assert "would not pay" in str(forecast)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"workers": 1}, "workers=1"),
        ({"link_gbits": 0}, "link_gbits=0"),
        ({"data": []}, "data has 0 batches for workers=4"),
        ({"data": batches(3)}, "data has 3 batches for workers=4"),
    ],
)
def test_a_report_needs_batches_workers_and_a_link(arguments, text):
    with pytest.raises(ValueError, match=text):
        report(**{"model": embedding(), "data": batches(1), "loss": loss} | arguments)
