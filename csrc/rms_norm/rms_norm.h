// RMS normalisation and its derivatives: the engine of ../norm with the statistic RmsNorm.
#pragma once

#include "../norm/params.h"
#include "../norm/statistic.h"
#include "params.h"
