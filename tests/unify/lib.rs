//! No code: [`Cargo.toml`](Cargo.toml) says what this package is for.
