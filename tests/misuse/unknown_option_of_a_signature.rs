// E0277: no type of an option in `signature!`
// What it is in a schema is not known.
tch_extension::signature! {
    pub Softcap: SoftcapIn -> SoftcapOut = "softcap"(x, cap: std::time::Duration) -> (y)
}

fn main() {}
