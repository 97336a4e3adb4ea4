// E0080: is a keyword of Python, where torch.ops takes arguments by name
// `torch.ops.my_ops.softshrink(x, lambda=0.5)` is no Python.
tch_extension::signature! {
    pub Softshrink: SoftshrinkIn -> SoftshrinkOut = "softshrink"(x, lambda: f64) -> (y)
}

fn main() {}
