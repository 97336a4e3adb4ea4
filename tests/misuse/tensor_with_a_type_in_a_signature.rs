// error: signature!: a tensor has no type: write `gain`, or `gain?` if it may be absent
// A name without a type is a tensor.
tch_extension::signature! {
    pub Scaled: ScaledIn -> ScaledOut = "scaled"(x, gain: Option<Tensor>) -> (y)
}

fn main() {}
