// E0133: unsafe
// Nothing can check that the C++ function has this type.
use tch_extension::jit;

fn main() {
    let module = jit::Extension::new("m").cpp("").load().expect("a module");
    let _ = module.symbol::<extern "C" fn(i32) -> i32>("f");
}
