//! A port for the store of an attempt.

use anyhow::{Context, Result};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

/// A port on which rank 0 can listen, and which nobody else gets meanwhile.
///
/// The kernel gives no program a port that is in the state TIME_WAIT unless the program names it. So
/// a connection to the port is made and closed here, from the listening side. A store can bind the
/// port all the same, because it sets SO_REUSEADDR, as servers do.
pub fn reserve() -> Result<u16> {
    let reserve = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let client = TcpStream::connect(address)?;
        // The side that closes first keeps the port in TIME_WAIT.
        drop(listener.accept()?);
        drop(client);
        Ok(address.port())
    };
    reserve().map_err(|error: std::io::Error| error).context("cannot find a free port")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_can_be_bound_and_is_given_to_nobody_else() {
        let port = reserve().unwrap();
        for _ in 0..200 {
            let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            assert_ne!(other.local_addr().unwrap().port(), port);
        }
        // Rust's listener sets SO_REUSEADDR, too.
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
    }
}
