"""Threads, processes, loading and errors, with a second library of operators that are wrong on purpose."""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
import time

import python_ops
import torch
from harness import check, equal, in_new_process, raises, same
from samples import gradients, ops, tensor
from torch.library import opcheck
from torch.testing._internal.optests.generate_tests import OpCheckError

# The second library in this process, also from Rust.
FAULTS = os.environ["PYTHON_FAULTS"]
torch.ops.load_library(FAULTS)
faults = torch.ops.python_faults


def registration_error(path):
    function = ctypes.CDLL(path).tch_extension_registration_error
    function.restype = ctypes.c_char_p
    return function()


@check
def a_wrong_fake_kernel_fails_opcheck():
    # It says that the result is as large as x. It has one row less.
    raises(
        OpCheckError,
        ["test_faketensor", "wrong_fake"],
        lambda: opcheck(faults.wrong_fake.default, (tensor(3, 4),)),
    )


@check
def a_kernel_that_writes_to_an_input_fails_opcheck():
    raises(
        OpCheckError,
        ["test_schema", "mutat"],
        lambda: opcheck(faults.writes_to_input.default, (tensor(3, 4),)),
    )


@check
def an_operator_without_a_fake_kernel_says_so():
    x = tensor(3)
    same(faults.without_fake(x), x + 1, "a call")
    compiled = torch.compile(faults.without_fake, fullgraph=True, backend="aot_eager")
    try:
        compiled(x)
    except Exception as error:
        text = str(error)
        equal("without_fake" in text, True, f"the operator's name in {text}")
        return
    raise AssertionError("it compiled without a fake kernel")


@check
def an_operator_without_a_gradient_is_no_constant():
    x = tensor(3, grad=True)
    raises(RuntimeError, ["without_gradient"], lambda: faults.without_gradient(x).sum().backward())


@check
def errors_and_panics_of_kernels_are_runtime_errors():
    for how, words in (("error", "an error on purpose"), ("panic", "a panic on purpose")):
        text = raises(RuntimeError, [words, "python_faults::fails"], lambda: faults.fails(tensor(2), how))
        equal(text.count("fails:"), 1, f"how often {text!r} names the operator")
    # The process is as before.
    same(ops.muladd(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0), "the next call")


@check
def errors_and_panics_of_backward_passes_are_runtime_errors():
    for how, words in (("error", "an error on purpose"), ("panic", "a panic on purpose")):
        x = tensor(2, grad=True)
        result = faults.fails_backward(x, how)
        raises(RuntimeError, [words], result.sum().backward)


@check
def two_threads():
    failures = []

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(50):
                a = torch.randn(64, generator=generator).requires_grad_()
                b = torch.randn(64, generator=generator).requires_grad_()
                found = gradients(ops.muladd, (a, b))
                same(found, gradients(lambda a, b: a * b + 1, (a, b)), f"thread {seed}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    equal(failures, [], "what the threads raised")


@check
def python_runs_while_a_kernel_does():
    done = threading.Event()

    def kernel():
        faults.sleeps(tensor(1), 0.5)
        done.set()

    thread = threading.Thread(target=kernel)
    thread.start()
    counted = 0
    while not done.is_set():
        time.sleep(0.01)
        counted += 1
    thread.join()
    # 50 if Python runs freely, and 1 or 2 if the kernel keeps the interpreter's lock.
    equal(counted > 10, True, f"Python went on, {counted} times")


def in_child(queue):
    a, b = tensor(3), tensor(3)
    queue.put(torch.equal(ops.muladd(a, b), a * b + 1))


@check
def a_forked_process_calls_it():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue,))
    child.start()
    equal(queue.get(timeout=60), True, "the child's result is right")
    child.join(60)
    equal(child.exitcode, 0, "the child's exit code")


@check
def loading_it_again_is_harmless():
    path = python_ops.LIBRARY
    torch.ops.load_library(path)
    equal(registration_error(str(path)), None, "an error of registration")


@check
def loading_a_copy_is_one_clear_error():
    script = """if True:
        import ctypes, sys, torch
        torch.ops.load_library(sys.argv[1])
        torch.ops.load_library(sys.argv[2])
        function = ctypes.CDLL(sys.argv[2]).tch_extension_registration_error
        function.restype = ctypes.c_char_p
        print(function().decode())
        x = torch.ones(2)
        assert torch.equal(torch.ops.python_ops.muladd(x, x), x + 1)
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "libcopy.so")
        shutil.copy(python_ops.LIBRARY, copy)
        process = in_new_process(script, str(python_ops.LIBRARY), copy)
    equal(process.returncode, 0, f"the exit code, with {process.stderr!r}")
    for output in (process.stdout, process.stderr):
        equal(len(output.splitlines()), 1, f"lines of {output!r}")
        equal("python_ops::muladd" in output, True, f"the operator is named in {output!r}")


@check
def the_process_ends_with_exit_code_0():
    script = """if True:
        import logging
        import python_ops, torch
        # torch warns that there is no triton.
        logging.disable(logging.WARNING)
        a = torch.ones(3, requires_grad=True)
        torch.ops.python_ops.muladd(a, a).sum().backward()
        kept = torch.ops.python_ops.swish(a, 1.0)
        held = torch.ops.python_ops.muladd.default
        torch.compile(torch.ops.python_ops.muladd, backend="aot_eager")(a, a).sum().backward()
    """
    process = in_new_process(script)
    equal((process.returncode, process.stderr), (0, ""), "the exit code and what was printed")


@check
def it_exports_few_symbols_and_no_path():
    def lines(*command):
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        return process.stdout.splitlines()

    path = str(python_ops.LIBRARY)
    dynamic = lines("readelf", "-d", path)
    paths = [line.split("[")[1].split("]")[0].split(":") for line in dynamic if "RPATH" in line or "RUNPATH" in line]
    # The kernel library of tch-extension, if it is shared, is looked for from where this library is.
    elsewhere = [path for path in sum(paths, []) if not path.startswith("$ORIGIN")]
    equal(elsewhere, [], "paths to libraries")
    equal(any("NODELETE" in line for line in dynamic), True, "it is never unloaded")
    names = [line.split()[-1] for line in lines("nm", "-D", "--defined-only", path)]
    equal([name for name in names if name.startswith("_Z")], [], "exported names of C++")
