// error: `: expected arguments: the tensors `x`, `x?`, `x!` and `x?!`, and options such as
// Only tensors have gradients.
tch_extension::signature! {
    pub Softcap: SoftcapIn -> SoftcapOut = "softcap"(x, cap!: f64) -> (y)
}

fn main() {}
