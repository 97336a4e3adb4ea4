// Layer normalisation and its derivatives: the engine of ../norm with the statistic LayerNorm.
#pragma once

#include "../norm/params.h"
#include "../norm/statistic.h"
#include "params.h"
