// ProcessGroupGloo.hpp includes this header but uses nothing of it (see README.md).
#pragma once
