// The sum of a branch and a residual stream, normalised, and its derivatives: the kernels of rows
// that are sums in ../norm with the statistic RmsNorm.
#pragma once

#include "../norm/params.h"
#include "../norm/statistic.h"
#include "params.h"
