//! Stores: small values by key, which all ranks share.

use super::failed;
use crate::Result;
use crate::ffi::distributed as ffi;
use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The time that an operation of a store waits for a key or a server, if nothing else is said.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// How long a store may take to answer when something has failed already.
const SIGNAL: Duration = Duration::from_secs(5);

/// Small values by key, which all ranks share: how ranks find one another.
///
/// [`get`](Store::get) and [`wait`](Store::wait) wait for keys that other ranks set. A store can be
/// used by several threads.
///
/// A call of a [`Store::tcp`] fails if the server does not answer within the timeout, or five seconds
/// later if the call waits: the server's process may be stopped, or its machine out of reach. Later calls
/// of this handle then fail at once.
///
/// Equivalent to: `torch.distributed.TCPStore`, `FileStore`, `HashStore` and
/// `PrefixStore`, whose C++ classes it uses.
///
/// ```
/// use std::time::Duration;
/// use tch_extension::distributed::Store;
///
/// let store = Store::hash(Duration::from_secs(5))?;
/// store.set("greeting", b"hello")?;
/// assert_eq!(store.get("greeting")?, b"hello");
/// assert_eq!(store.add("count", 2)?, 2);
/// assert_eq!(store.add("count", 3)?, 5);
///
/// let part = store.prefix("part")?;
/// part.set("greeting", b"hi")?;
/// assert_eq!(store.get("part/greeting")?, b"hi");
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Clone)]
pub struct Store {
    inner: Arc<ffi::Store>,
    /// Of the server, if it is a [`Store::tcp`].
    port: Option<u16>,
    timeout: Duration,
    /// Whether all ranks that use it are on this machine.
    pub(super) is_local: bool,
}

/// How a rank takes part in a [`Store::tcp`].
#[derive(Clone, Debug)]
pub struct TcpStoreOptions {
    /// Whether this process has the server, which exactly one must have. Default: false.
    pub server: bool,
    /// The number of ranks, server included, that must have come before the server's and the others'
    /// calls return; `None` waits for nobody. Default: `None`.
    pub workers: Option<usize>,
    /// Whether a server of this process for the same port is used again. Default: true, as in
    /// PyTorch.
    pub multi_tenant: bool,
    /// How long to wait for the server, for the other ranks, and later for keys. Default: 300 s.
    pub timeout: Duration,
}

impl Default for TcpStoreOptions {
    fn default() -> Self {
        TcpStoreOptions {
            server: false,
            workers: None,
            multi_tenant: true,
            timeout: DEFAULT_TIMEOUT,
        }
    }
}

impl Store {
    /// A store that a server in one of the processes keeps.
    ///
    /// With `port` 0, the server takes a free one, which [`Store::port`] tells.
    ///
    /// # Errors
    /// When the port is taken, when there is no server until the timeout, when what listens at the
    /// port is no store, or when not all ranks come.
    pub fn tcp(host: &str, port: u16, options: &TcpStoreOptions) -> Result<Store> {
        let op = "Store::tcp";
        if port == 0 && !options.server {
            return Err(failed(
                op,
                "port 0 is none that a client could connect to; pass the server's",
            ));
        }
        let kind = (options.server, options.multi_tenant);
        let workers = options.workers.unwrap_or(0) as u64;
        let (store, port) =
            ffi::Store::tcp(host, port, kind, workers, options.timeout).map_err(|reason| {
                // A server that cannot listen says why; what listens there may well be a store.
                let hint = if !options.server && answers(host, port) { NO_STORE } else { "" };
                failed(op, format!("{host}:{port}: {reason}{hint}"))
            })?;
        let is_local = ["127.0.0.1", "localhost", "::1"].contains(&host);
        Ok(Store::new(store, Some(port), options.timeout, is_local))
    }

    /// A store in a file, which all ranks can reach. `ranks` is their number; the last one removes
    /// the file. A file that an earlier run has left must be removed before.
    ///
    /// # Errors
    /// When the path is not UTF-8, or the file cannot be written.
    pub fn file(path: impl AsRef<Path>, ranks: usize, timeout: Duration) -> Result<Store> {
        let (op, path) = ("Store::file", path.as_ref());
        let text = path.to_str().ok_or_else(|| {
            failed(op, format!("{} is not UTF-8; choose another path", path.display()))
        })?;
        // c10d would only find out when the first key is set, and then wait for the file.
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(|error| failed(op, format!("{text}: {error}")))?;
        let ranks = i32::try_from(ranks).map_err(|_| failed(op, "too many ranks"))?;
        let store = ffi::Store::file(text, ranks, timeout)
            .map_err(|reason| failed(op, format!("{text}: {reason}")))?;
        Ok(Store::new(store, None, timeout, false))
    }

    /// A store in the memory of this process, for ranks that are threads of it. Clones of the handle
    /// are the same store.
    ///
    /// # Errors
    /// When libtorch reports one.
    pub fn hash(timeout: Duration) -> Result<Store> {
        let store = ffi::Store::hash(timeout).map_err(|reason| failed("Store::hash", reason))?;
        Ok(Store::new(store, None, timeout, true))
    }

    /// The same store, with this text and a `/` before every key.
    ///
    /// # Errors
    /// When libtorch reports one.
    pub fn prefix(&self, prefix: &str) -> Result<Store> {
        let store = self.inner.prefix(prefix).map_err(|reason| failed("Store::prefix", reason))?;
        Ok(Store::new(store, self.port, self.timeout, self.is_local))
    }

    /// The same store with a connection of its own, if it has connections, for what is said and asked
    /// after a failure: it waits for [`SIGNAL`] at most.
    pub(super) fn reconnected(&self) -> Result<Store> {
        let timeout = self.timeout.min(SIGNAL);
        let store = self.inner.try_clone(timeout).map_err(|reason| failed("Store", reason))?;
        Ok(Store::new(store, self.port, timeout, self.is_local))
    }

    fn new(store: ffi::Store, port: Option<u16>, timeout: Duration, is_local: bool) -> Store {
        Store { inner: Arc::new(store), port, timeout, is_local }
    }

    pub(super) fn handle(&self) -> &ffi::Store {
        &self.inner
    }

    /// The server's port, if it is a [`Store::tcp`].
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// How long [`Store::get`] waits.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sets a key.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.set(key, value).map_err(|reason| of_key("Store::set", key, &reason))
    }

    /// The value of a key. Waits until a rank has set it, at most for the store's timeout.
    ///
    /// # Errors
    /// When nobody sets the key in time, or the server cannot be reached.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.inner.get(key).map_err(|reason| of_key("Store::get", key, &reason))
    }

    /// Sets a key to `desired` if its value is `expected`, or if it is unset and `expected` is
    /// empty. Returns the value afterwards.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.inner
            .compare_set(key, expected, desired)
            .map_err(|reason| of_key("Store::compare_set", key, &reason))
    }

    /// Adds to a number, which is 0 at first, and returns the sum.
    ///
    /// # Errors
    /// When the key has a value that is no number, or the server cannot be reached.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.inner.add(key, amount).map_err(|reason| of_key("Store::add", key, &reason))
    }

    /// Waits until a rank has set the key.
    ///
    /// # Errors
    /// When nobody sets the key in time, or the server cannot be reached.
    pub fn wait(&self, key: &str, timeout: Duration) -> Result<()> {
        self.inner.wait(key, timeout).map_err(|reason| of_key("Store::wait", key, &reason))
    }

    /// Whether a key is set.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub fn check(&self, key: &str) -> Result<bool> {
        self.inner.check(key).map_err(|reason| of_key("Store::check", key, &reason))
    }

    /// Removes a key, and returns whether it was set. A store in a file always returns the same.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub fn delete(&self, key: &str) -> Result<bool> {
        self.inner.delete(key).map_err(|reason| of_key("Store::delete", key, &reason))
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("port", &self.port).field("timeout", &self.timeout).finish()
    }
}

/// What is said when a store cannot be had and the port can.
const NO_STORE: &str = "; the port answers, but what answers is no store, or is stopped: correct MASTER_ADDR and MASTER_PORT";

/// Whether something accepts connections there.
fn answers(host: &str, port: u16) -> bool {
    let connects = |address| {
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok()?;
        // Without a listener, Linux may connect a socket to itself.
        Some(stream.local_addr().ok()? != stream.peer_addr().ok()?)
    };
    let addresses = (host, port).to_socket_addrs();
    addresses.is_ok_and(|mut addresses| addresses.any(|address| connects(address) == Some(true)))
}

fn of_key(op: &str, key: &str, reason: &str) -> crate::Error {
    failed(op, format!("key {key:?}: {reason}"))
}
