// Replaces pybind11's header of this name, which many sources include and never use. A type that no
// operator can take is refused where it is used.
#pragma once

#include <pybind11/pybind11.h>
