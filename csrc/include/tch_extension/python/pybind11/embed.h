// Replaces pybind11's header of this name, which cannot work without an interpreter.
#pragma once

#error \
    "tch_extension: pybind11/embed.h needs Python, and there is none here; operators take and return tensors"
