"""Tests the installed wheel: `cargo xtask wheel` runs this in an environment that has the wheel and torch, and nothing else.

The operators have tests of their own. These are about what a user of the wheel sees: the package, its functions and its modules,
which must compute what torch.nn's compute.
"""

import base64
import copy
import ctypes
import hashlib
import importlib.metadata
import inspect
import io
import os
import pickle
import shutil
import sys
import tempfile
import traceback
import unittest.mock
import warnings
from pathlib import Path

import torch
import torch._dynamo.testing
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import tch_extension
from tch_extension import _build, _library

EXACT = dict(rtol=1e-9, atol=1e-11)  # in float64
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


# --- the package ----------------------------------------------------------------------------------


@check
def the_metadata_are_those_of_this_torch():
    found = importlib.metadata.distribution("tch-extension")
    assert found.version == tch_extension.__version__ == _build.VERSION, found.version
    assert found.metadata["License-Expression"] == "MIT OR Apache-2.0"
    assert found.requires == [f"torch=={_build.TORCH}.*"], found.requires
    assert torch.__version__.startswith(_build.TORCH + "."), torch.__version__


@check
def each_file_is_the_one_that_was_packed():
    seen = 0
    for file in importlib.metadata.files("tch-extension"):
        if file.hash is not None:
            digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
            assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value, file
            seen += file.suffix in (".so", ".py", ".typed")
    assert seen >= 7, f"only {seen} files have a hash"


@check
def another_torch_is_refused_before_the_library_is_loaded():
    def message(version, cuda):
        with unittest.mock.patch.object(torch, "__version__", version):
            with unittest.mock.patch.object(torch.version, "cuda", cuda):
                return _library.mismatch("1.2.3+torch2.11.cu130", "2.11", "13.0")

    assert message("2.11.0+cu130", "13.0") is None
    assert message("2.11.1", "13.2") is None
    assert "this is torch 2.13.0+cu130" in message("2.13.0+cu130", "13.0")
    assert "has no CUDA" in message("2.11.0+cpu", None)
    assert "has CUDA 12.8" in message("2.11.0+cu128", "12.8")
    try:
        _library.load("1.2.3", "9.9", None)
    except ImportError as error:
        assert "torch 9.9" in str(error), error
    else:
        raise AssertionError("a torch of another version was accepted")


def message_of(kind, function):
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


@check
def what_keeps_the_library_from_loading_is_in_the_message():
    def load(file):
        with unittest.mock.patch.object(_library, "LIBRARY", file):
            _library.load(_build.VERSION, _build.TORCH, _build.CUDA)

    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "libbroken.so"
        broken.write_text("no library")
        text = message_of(ImportError, lambda: load(broken))
        assert str(broken) in text and "file too short" in text, text
        copied = Path(folder) / _library.LIBRARY.name
        shutil.copy(_library.LIBRARY, copied)
        text = message_of(ImportError, lambda: load(copied))
        assert str(copied) in text and str(_library.LIBRARY.resolve()) in text and "one copy" in text, text
        assert ".rs" not in text, text
    load(_library.LIBRARY)  # the same file again changes nothing


@check
def an_argument_of_another_type_is_a_type_error():
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    F = torch.nn.functional
    for ours, theirs in [
        (lambda: tch_extension.linear(x, "weight"), lambda: F.linear(x, "weight")),
        (lambda: tch_extension.layer_norm(x, 4), lambda: F.layer_norm(x, 4)),
        (lambda: tch_extension.rms_norm(x, (4,), eps="small"), lambda: F.rms_norm(x, (4,), eps="small")),
        (lambda: tch_extension.cross_entropy(x, [1, 2, 3]), lambda: F.cross_entropy(x, [1, 2, 3])),
    ]:
        message_of(TypeError, theirs)
        text = message_of(TypeError, ours)
        assert "Expected a value of type" in text and "\n" not in text and "::" not in text, text
    message_of(RuntimeError, lambda: tch_extension.linear(x, weight[:, :3]))


@check
def functions_and_operators_have_the_same_arguments():
    names = [name for name in tch_extension.__all__ if name not in ("__version__", "nn", "open_library")]
    assert len(names) >= 15, names
    for name in names:
        function = inspect.signature(getattr(tch_extension, name))
        schema = getattr(torch.ops.tch_extension, name).default._schema
        expected = [
            (arg.name, arg.default_value if arg.has_default_value() else inspect.Parameter.empty)
            for arg in schema.arguments
        ]
        found = [(arg.name, arg.default) for arg in function.parameters.values()]
        assert found == expected, f"{name}: {found} for {schema}"
        assert getattr(tch_extension, name).__doc__, f"{name} has no documentation"


@check
def the_library_of_the_open_functions_is_named():
    library = ctypes.CDLL(tch_extension.open_library())
    # No arguments at all: an error, which without TVM FFI is on stderr.
    function = getattr(library, "__tvm_ffi_rms_norm")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
    assert function(None, None, 0, None) != 0


@check
def operators_pass_opcheck():
    def of(*shape):
        return torch.randn(*shape, requires_grad=True)

    operators = torch.ops.tch_extension
    target = torch.tensor([0, 4, 2])
    torch.library.opcheck(operators.layer_norm, (of(3, 5), [5], of(5), of(5)))
    torch.library.opcheck(operators.linear_cross_entropy, (of(3, 4), of(5, 4), target, of(5)))
    torch.library.opcheck(
        operators.lstm, (of(2, 3, 4), of(3, 5), of(3, 5), of(20, 4), of(20, 5), of(20), of(20))
    )


# --- modules --------------------------------------------------------------------------------------


def leaves(value):
    """All tensors in what a module takes or gives."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or isinstance(value, (bool, int)):
        return []
    return [tensor for part in value for tensor in leaves(part)]


def with_gradients(module, arguments):
    """The outputs, and the gradients of parameters and arguments."""
    arguments = [
        value.detach().clone().requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for value in arguments
    ]
    results = module(*arguments)
    outputs = [output for output in leaves(results) if output.is_floating_point()]
    torch.manual_seed(7)
    sum((output * torch.randn_like(output)).sum() for output in outputs).backward()
    inputs = list(module.parameters()) + [value for value in arguments if getattr(value, "requires_grad", False)]
    return results, [value.grad for value in inputs]


def compare(name, ours, theirs):
    ours, theirs = leaves(ours), leaves(theirs)
    assert len(ours) == len(theirs), f"{name}: {len(ours)} tensors, and torch.nn has {len(theirs)}"
    for place, (found, expected) in enumerate(zip(ours, theirs)):
        assert found.dtype == expected.dtype, f"{name}, tensor {place}: {found.dtype}, {expected.dtype}"
        torch.testing.assert_close(found, expected, **EXACT, msg=lambda text: f"{name}, tensor {place}: {text}")


def is_drop_in(name, ours, theirs, arguments):
    """The same parameters in both directions, and the same outputs and gradients."""
    assert list(ours.state_dict()) == list(theirs.state_dict()), name
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    found, gradients = with_gradients(ours, arguments)
    expected, of_theirs = with_gradients(theirs, arguments)
    assert type(found) is type(expected), f"{name}: {type(found)}"
    compare(name, found, expected)
    compare(f"{name}, gradients", gradients, of_theirs)
    again = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    compare(f"{name}, copied", again(*arguments), expected)


def ours_and_torchs(name):
    return getattr(tch_extension.nn, name), getattr(torch.nn, name)


def state_for(name, *shape):
    h = torch.randn(*shape)
    return (h, torch.randn(*shape)) if name == "LSTM" else h


class WithState(torch.nn.Module):
    """Takes h and c as arguments of their own, so that they get gradients."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, *state):
        return self.layers(x, tuple(state) if len(state) == 2 else state[0])


@check
def recurrent_layers_are_drop_ins():
    for name in ("LSTM", "GRU"):
        ours, theirs = ours_and_torchs(name)
        for options in (
            dict(),
            dict(num_layers=2),
            dict(bias=False),
            dict(batch_first=True),
            dict(bidirectional=True),
            dict(num_layers=3, bidirectional=True, batch_first=True, bias=False),
        ):
            pair = ours(4, 6, **options), theirs(4, 6, **options)
            label = f"{name} {options}"
            x = torch.randn(5, 3, 4)
            is_drop_in(label, *pair, [x])
            is_drop_in(f"{label}, one sequence", *pair, [x[:, 0]])
            layers = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
            batch = 5 if options.get("batch_first") else 3
            state = leaves(state_for(name, layers, batch, 6))
            is_drop_in(f"{label}, with a state", *map(WithState, pair), [x, *state])
            alone = [part[:, 0] for part in state]
            is_drop_in(f"{label}, one sequence with a state", *map(WithState, pair), [x[:, 0], *alone])
            assert pair[0].extra_repr() == pair[1].extra_repr()


class Packed(torch.nn.Module):
    """Packs sequences of different lengths, which get gradients, too."""

    def __init__(self, layers, name, is_sorted):
        super().__init__()
        self.layers = layers
        self.name = name
        self.is_sorted = is_sorted

    def forward(self, *sequences):
        state = None
        if not self.is_sorted:
            torch.manual_seed(3)
            state = state_for(self.name, 4, len(sequences), 6)
        packed = pack_sequence(sequences, enforce_sorted=self.is_sorted)
        output, state = self.layers(packed, state)
        for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            found, expected = getattr(output, field), getattr(packed, field)
            assert found is expected or found.equal(expected), field
        return output.data, pad_packed_sequence(output)[0], state


@check
def sequences_of_different_lengths_are_those_of_torch():
    for name in ("LSTM", "GRU"):
        pair = [module(4, 6, num_layers=2, bidirectional=True) for module in ours_and_torchs(name)]
        for lengths, is_sorted in (([7, 4, 4, 1], True), ([2, 5, 1, 5], False), ([3, 3], True)):
            sequences = [torch.randn(length, 4) for length in lengths]
            wrapped = [Packed(module, name, is_sorted) for module in pair]
            is_drop_in(f"{name}, lengths {lengths}", *wrapped, sequences)


@check
def a_compiled_model_breaks_its_graph_for_packed_sequences():
    """torch.compile leaves torch.nn's out of its graphs, too."""
    for layers in (tch_extension.nn.LSTM(4, 6, bidirectional=True), tch_extension.nn.GRU(4, 6, num_layers=2)):
        compiled = torch.compile(layers, backend="aot_eager")
        for steps in (5, 7):
            packed = pack_sequence([torch.randn(length, 4) for length in (steps, 3, 1)])
            with warnings.catch_warnings():
                # torch.compile looks at the .grad of what it goes on with.
                warnings.simplefilter("ignore", UserWarning)
                compare(f"{steps} steps", compiled(packed)[0].data, layers(packed)[0].data)


@check
def dropout_between_layers_is_torchs():
    for name in ("LSTM", "GRU"):
        for dropout in (0.4, 1.0):
            ours, theirs = [module(4, 6, num_layers=3, dropout=dropout) for module in ours_and_torchs(name)]
            theirs.load_state_dict(ours.state_dict())
            x = torch.randn(5, 3, 4)
            for training in (True, False):
                results = []
                for module in (ours, theirs):
                    torch.manual_seed(11)
                    results.append(module.train(training)(x))
                compare(f"{name}, dropout {dropout}, training {training}", *results)


@check
def a_state_can_be_detached_in_place_as_torchs_can():
    """The idiom of truncated backpropagation, with one layer in one direction and with more."""
    for name in ("LSTM", "GRU"):
        for options in (dict(), dict(batch_first=True), dict(num_layers=2, bidirectional=True)):
            ours, theirs = [module(4, 6, **options) for module in ours_and_torchs(name)]
            theirs.load_state_dict(ours.state_dict())
            x = torch.randn(3, 3, 4)
            results = []
            for module in (ours, theirs):
                state = None
                for _ in range(3):
                    output, state = module(x, state)
                    (output.sin().sum() + sum(part.sum() for part in leaves(state))).backward()
                    for part in leaves(state):
                        assert part.detach_().is_leaf
                results.append([*leaves(state), *(parameter.grad for parameter in module.parameters())])
            compare(f"{name} {options}", *results)
            # Changing the state in place does not change what the backward pass reads.
            output, state = ours(x)
            expected = torch.autograd.grad(output.sum(), ours.weight_hh_l0, retain_graph=True)
            with torch.no_grad():
                for part in leaves(state):
                    part.zero_()
            compare(f"{name} {options}, zeroed", torch.autograd.grad(output.sum(), ours.weight_hh_l0), expected)


@check
def what_recurrent_layers_do_not_take_is_an_error():
    def refused(kind, text, function):
        try:
            function()
        except kind as error:
            assert text in str(error), f"{text!r} is not in {error}"
        else:
            raise AssertionError(f"no {kind.__name__} with {text!r}")

    lstm, gru = tch_extension.nn.LSTM(4, 6), tch_extension.nn.GRU(4, 6)
    x = torch.randn(5, 3, 4)
    refused(TypeError, "proj_size", lambda: tch_extension.nn.GRU(4, 6, proj_size=2))
    with unittest.mock.patch("torch.onnx.is_in_onnx_export", lambda: True):
        refused(RuntimeError, "load the state_dict into a torch.nn.GRU", lambda: gru(x))
    refused(ValueError, "hidden_size", lambda: tch_extension.nn.GRU(4, 0))
    refused(ValueError, "2 or 3 dimensions", lambda: lstm(x[None]))
    refused(RuntimeError, "input_size", lambda: lstm(x[..., :3]))
    refused(ValueError, "convert the input with .to(torch.float64)", lambda: gru(x.float()))
    refused(ValueError, "convert the input with .to(torch.float64)", lambda: lstm(pack_sequence([x[:, 0].float()])))
    refused(RuntimeError, "h must have the shape (1, 3, 6)", lambda: gru(x, torch.zeros(1, 2, 6)))
    refused(RuntimeError, "c must have the shape (1, 3, 6)", lambda: lstm(x, (torch.zeros(1, 3, 6), torch.zeros(1, 3, 5))))
    refused(RuntimeError, "hx must be (h, c), got 1", lambda: lstm(x, (torch.zeros(1, 3, 6),)))
    refused(RuntimeError, "h must have 2 dimensions", lambda: gru(x[:, 0], torch.zeros(1, 1, 6)))
    refused(RuntimeError, "h must have the shape", lambda: gru(pack_sequence([x[:, 0]]), torch.zeros(1, 2, 6)))
    loss = tch_extension.nn.LinearCrossEntropy(4, 9)
    refused(RuntimeError, "target has the shape (5,)", lambda: loss(x, torch.zeros(5, dtype=torch.long)))
    refused(ValueError, "target has the shape (4, 3)", lambda: loss(x, torch.zeros(4, 3, dtype=torch.long)))


@check
def with_a_projection_all_is_torchs():
    ours, theirs = ours_and_torchs("LSTM")
    for options in (dict(), dict(num_layers=2, bidirectional=True, batch_first=True)):
        pair = ours(4, 6, proj_size=2, **options), theirs(4, 6, proj_size=2, **options)
        is_drop_in(f"LSTM with a projection, {options}", *pair, [torch.randn(5, 3, 4)])
        assert pair[0].extra_repr() == pair[1].extra_repr()


@check
def constructors_have_torchs_arguments():
    for name in ("LSTM", "GRU"):
        parameters = list(inspect.signature(getattr(tch_extension.nn, name)).parameters)
        expected = list(inspect.signature(torch.nn.RNNBase).parameters)[1:]
        assert parameters == [one for one in expected if name == "LSTM" or one != "proj_size"], parameters


@check
def lengths_may_be_a_tensor():
    x, h, c = torch.randn(5, 3, 4), torch.randn(3, 6), torch.randn(3, 6)
    for name, states, gates in (("lstm", (h, c), 24), ("gru", (h,), 18)):
        function = getattr(tch_extension, name)
        arguments = (x, *states, torch.randn(gates, 4), torch.randn(gates, 6))
        lengths = [2, 5, 1]
        compare(name, function(*arguments, lengths=torch.tensor(lengths)), function(*arguments, lengths=lengths))
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(lambda of, function=function, x=arguments: function(*x, lengths=of), backend=counter)
        frames = set()
        for lengths in ([2, 5, 1], [3, 3, 5], [1, 4, 4]):
            found = compiled(torch.tensor(lengths))
            compare(f"{name}, compiled", found, function(*arguments, lengths=lengths))
            frames.add(counter.frame_count)
        assert len(frames) == 1, f"{name}: compiled again for other lengths: {frames}"
        text = message_of(TypeError, lambda: function(*arguments, lengths=torch.tensor([1.0, 2.0, 3.0])))
        assert f"{name}: lengths: expected integers" in text, text


@check
def norms_are_drop_ins():
    x = torch.randn(3, 5, 8)
    for options in (dict(), dict(eps=1e-2), dict(bias=False), dict(elementwise_affine=False)):
        for shape in (8, (5, 8)):
            pair = tch_extension.nn.LayerNorm(shape, **options), torch.nn.LayerNorm(shape, **options)
            is_drop_in(f"LayerNorm {shape} {options}", *pair, [x])
    for options in (dict(), dict(eps=1e-2), dict(elementwise_affine=False)):
        pair = tch_extension.nn.RMSNorm(8, **options), torch.nn.RMSNorm(8, **options)
        is_drop_in(f"RMSNorm {options}", *pair, [x])


@check
def the_cross_entropy_is_torchs_for_all_shapes():
    logits, classes = torch.randn(6, 5), torch.tensor([0, 4, 2, -100, 1, 3])
    weight = torch.rand(5)
    for input, target in (
        (logits, classes),
        (logits, torch.rand(6, 5)),
        (logits[0], torch.tensor(3)),
        (logits[0], torch.rand(5)),
        (logits, torch.tensor([0, 4, 2, 1, 1, 3], dtype=torch.uint8)),
        (torch.randn(2, 5, 3), torch.randint(0, 5, (2, 3))),
        (torch.randn(2, 5, 3, 4), torch.randint(0, 5, (2, 3, 4))),
    ):
        for options in (dict(), dict(reduction="none"), dict(reduction="sum", label_smoothing=0.1, weight=weight)):
            pair = [nn.CrossEntropyLoss(**options) for nn in (tch_extension.nn, torch.nn)]
            is_drop_in(f"CrossEntropyLoss {tuple(input.shape)} {options}", *pair, [input, target])


class LinearThenCrossEntropy(torch.nn.Linear):
    """What LinearCrossEntropy takes the place of."""

    def __init__(self, *args, loss, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss = torch.nn.CrossEntropyLoss(**loss)

    def forward(self, input, target):
        return self.loss(super().forward(input).movedim(-1, 1), target)


@check
def the_loss_is_a_linear_layer_and_its_cross_entropy():
    x, target = torch.randn(3, 5, 8), torch.randint(0, 11, (3, 5))
    target[1, 2] = -100
    for bias in (True, False):
        for loss in (dict(), dict(reduction="sum", label_smoothing=0.1), dict(reduction="none", ignore_index=3)):
            if loss:
                target[1, 2] = loss.get("ignore_index", -100)
            ours = tch_extension.nn.LinearCrossEntropy(8, 11, bias, **loss)
            theirs = LinearThenCrossEntropy(8, 11, bias, loss=loss)
            is_drop_in(f"LinearCrossEntropy, bias {bias}, {loss}", ours, theirs, [x, target])
            plain = torch.nn.Linear(8, 11, bias)
            plain.load_state_dict(ours.state_dict(), strict=True)
            compare("logits", ours.logits(x), plain(x))
    capped = tch_extension.nn.LinearCrossEntropy(8, 11, softcap=2.0, z_loss=0.25)
    logits = 2.0 * torch.tanh((x @ capped.weight.T + capped.bias) / 2.0)
    compare("softcap", capped.logits(x), logits)
    target = torch.randint(0, 11, (3, 5))
    rows = torch.nn.functional.cross_entropy(logits.movedim(-1, 1), target, reduction="none")
    compare("z_loss", capped(x, target), (rows + 0.25 * logits.logsumexp(-1) ** 2).mean())


class Model(torch.nn.Module):
    def __init__(self, nn):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.rnn = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(12)
        self.loss = nn.LinearCrossEntropy(12, 11)

    def forward(self, tokens, targets):
        hidden, _ = self.rnn(self.embedding(tokens))
        return self.loss(self.norm(hidden), targets)


@check
def a_model_compiles_into_one_graph():
    model = Model(tch_extension.nn)
    tokens = torch.randint(0, 11, (4, 7))
    arguments = [tokens, tokens.roll(-1, 1)]
    expected, gradients = with_gradients(model, arguments)
    model.zero_grad()
    # The code that inductor generates takes minutes to compile.
    backend = "inductor" if os.environ.get("TCH_EXTENSION_FULL") else "aot_eager"
    found, compiled = with_gradients(torch.compile(model, fullgraph=True, backend=backend), arguments)
    compare("loss", found, expected)
    compare("gradients", compiled, gradients)


@check
def a_traced_module_is_saved_and_loaded():
    module = tch_extension.nn.LSTM(4, 6, num_layers=2, bidirectional=True)
    traced = torch.jit.trace(module, (torch.randn(5, 3, 4),))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    # Another number of steps and another batch than those that were traced.
    x = torch.randn(7, 2, 4)
    compare("traced", loaded(x), module(x))


@check
def autocast_gives_torchs_kinds():
    x = torch.randn(5, 3, 4, dtype=torch.float32)
    for name, arguments in (("LSTM", (4, 6)), ("GRU", (4, 6)), ("LayerNorm", (4,)), ("RMSNorm", (4,))):
        ours, theirs = [module(*arguments, dtype=torch.float32) for module in ours_and_torchs(name)]
        with torch.autocast("cpu", torch.bfloat16):
            found = [tensor.dtype for tensor in leaves(ours(x))]
            try:
                expected = [tensor.dtype for tensor in leaves(theirs(x))]
            except RuntimeError as error:
                # oneDNN has an LSTM in bfloat16 for CPUs with AVX-512 only. There it is all in bfloat16.
                if name != "LSTM" or "primitive descriptor" not in str(error):
                    raise
                expected = [torch.bfloat16] * len(found)
        assert found == expected, f"{name}: {found}, {expected}"


@check
def forward_mode_is_refused_by_name():
    module = tch_extension.nn.GRU(4, 6)
    x = torch.randn(5, 3, 4)
    try:
        torch.func.jvp(lambda x: module(x)[0], (x,), (x,))
    except RuntimeError as error:
        assert "gru" in str(error) and "forward-mode" in str(error), error
    else:
        raise AssertionError("a forward-mode derivative, which would be silently zero")


def main():
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("error", UserWarning)
    failed = []
    words = sys.argv[1:]
    for function in CHECKS:
        if words and not any(word in function.__name__ for word in words):
            continue
        torch.manual_seed(0)
        try:
            function()
        except Exception:
            traceback.print_exc()
            failed.append(function.__name__)
        print(f"{function.__name__} ... {'FAILED' if function.__name__ in failed else 'ok'}", flush=True)
    sys.exit(f"{len(failed)} failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
