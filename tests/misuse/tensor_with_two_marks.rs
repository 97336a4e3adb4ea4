// error: `: expected the names of tensors: `x`, `x?` if it may be absent
// Twice the same mark says nothing more.
tch_extension::slots! {
    pub struct Inputs { x?? }
}

fn main() {}
