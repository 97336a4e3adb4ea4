// error: `: expected the names of tensors: `x`, `x?` if it may be absent
// A tensor that may be absent has no gradient where it is absent.
tch_extension::slots! {
    pub struct Inputs { x?! }
}

fn main() {}
