// What newer compilers and C libraries take for granted, for a library that also runs with
// glibc 2.28 and the libstdc++ of GCC 8: `cargo xtask wheel` links this into the wheel's library.
// Each function is defined by what the old libraries have. All are hidden, so that no other library
// of the process sees them.

#include <new>

#define HIDDEN __attribute__((visibility("hidden")))

// GCC 11 made two private functions of std::exception_ptr public, which its copies and destructors,
// now inline, call. The old library has the copy constructor and the destructor themselves. They
// are named with their versions, because the compiler also emits its inline ones, which would call
// the functions below.
__asm__(".symver old_copy, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver old_destroy, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");

extern "C" {
void old_copy(void* to, const void* from);
void old_destroy(void* pointer);

// void std::exception_ptr::_M_addref(): a copy that is never destroyed.
HIDDEN void _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv(void* self) {
  void* copy = nullptr;
  old_copy(&copy, self);
}

// void std::exception_ptr::_M_release()
HIDDEN void _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv(void* self) { old_destroy(self); }

// std::ostringstream::ostringstream(): the old library has only the constructor with a mode, whose
// default is `out`.
void _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode(void*, int);
HIDDEN void _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* self) {
  constexpr int out = 16;
  _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode(self, out);
}

// void std::__throw_bad_array_new_length()
HIDDEN void _ZSt28__throw_bad_array_new_lengthv() { throw std::bad_array_new_length(); }

// glibc 2.33 has these as functions; older ones have them in the compiler's headers, as calls of
// what is here.
int __xstat64(int version, const char* path, void* result);
int __lxstat64(int version, const char* path, void* result);
int __fxstat64(int version, int file, void* result);
int __fxstatat64(int version, int folder, const char* path, void* result, int flags);

constexpr int stat_version = 1;  // _STAT_VER on x86-64

HIDDEN int stat64(const char* path, void* result) { return __xstat64(stat_version, path, result); }
HIDDEN int lstat64(const char* path, void* result) {
  return __lxstat64(stat_version, path, result);
}
HIDDEN int fstat64(int file, void* result) { return __fxstat64(stat_version, file, result); }
HIDDEN int fstatat64(int folder, const char* path, void* result, int flags) {
  return __fxstatat64(stat_version, folder, path, result, flags);
}

// Whether the process has one thread only, since glibc 2.32. If it is always 0, reference counts
// are always atomic.
HIDDEN char __libc_single_threaded = 0;
}

static_assert(sizeof(void*) == 8, "for x86-64 only");
