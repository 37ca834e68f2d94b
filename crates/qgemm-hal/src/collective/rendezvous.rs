//! [`Rendezvous`]: where the processes of a group find each
//! other.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use super::host::HostCommunicator;
use super::socket_group::SocketRank;
use crate::error::HalError;

/// Time between looks for a file.
const RETRY: Duration = Duration::from_millis(5);
/// Most processes of a group.
const MOST_RANKS: usize = 1024;
/// Longest address in a file.
const MOST_ADDRESS: u64 = 64;

/// Where the processes of a group on one machine find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rendezvous {
    /// Address on loopback at which rank 0 listens:
    /// `127.0.0.1:29500`.
    Tcp(SocketAddr),
    /// File into which rank 0 writes where it listens. It must not
    /// exist before, and is removed when all have come.
    File(PathBuf),
}

impl Rendezvous {
    /// Joins the group as `rank` of `world`. Waits up to `limit` for
    /// the others, now and in every exchange.
    ///
    /// # Errors
    /// [`HalError::BadGroup`] for a rank beyond the world, an address
    /// that is not on loopback, or a file that exists;
    /// [`HalError::RankSilent`], [`HalError::RankGone`] and
    /// [`HalError::CollectiveMismatch`] as of an exchange.
    pub fn join(&self, rank: usize, world: usize, limit: Duration) -> Result<HostCommunicator, HalError> {
        if rank >= world || world > MOST_RANKS {
            let expected = format!("a rank of at most {MOST_RANKS}");
            return Err(HalError::BadGroup { expected, got: format!("rank {rank} of {world}") });
        }
        let joined = match (self, rank) {
            (Self::Tcp(address), _) if !address.ip().is_loopback() => {
                return Err(HalError::BadGroup { expected: "an address on loopback".into(), got: address.to_string() });
            }
            (Self::Tcp(address), 0) => SocketRank::host(&listen(*address)?, world, limit)?,
            (Self::Tcp(address), _) => SocketRank::join(*address, [rank, world], limit)?,
            (Self::File(path), 0) => {
                let listener = listen((Ipv4Addr::LOCALHOST, 0).into())?;
                write_address(path, &listener)?;
                let joined = SocketRank::host(&listener, world, limit);
                let removed = fs::remove_file(path).map_err(|error| file_error(path, "remove it", &error));
                let joined = joined?;
                removed?;
                joined
            }
            (Self::File(path), _) => SocketRank::join(read_address(path, limit)?, [rank, world], limit)?,
        };
        Ok(HostCommunicator::new(joined))
    }
}

/// An address, else a path.
impl FromStr for Rendezvous {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text.parse().map_or_else(|_| Self::File(text.into()), Self::Tcp))
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener, HalError> {
    TcpListener::bind(address)
        .map_err(|error| HalError::BadGroup { expected: format!("a free port at {address}"), got: error.to_string() })
}

/// Writes where `listener` listens, for the first time.
fn write_address(path: &Path, listener: &TcpListener) -> Result<(), HalError> {
    let address = listener.local_addr().map_err(|error| file_error(path, "ask for the address", &error))?;
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    // A link appears with its contents, and replaces nothing.
    let linked = fs::write(&beside, address.to_string()).and_then(|()| fs::hard_link(&beside, path));
    let removed = fs::remove_file(&beside);
    linked.and(removed).map_err(|error| file_error(path, "write it anew", &error))
}

/// Waits for the file, and reads the address.
fn read_address(path: &Path, limit: Duration) -> Result<SocketAddr, HalError> {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        let is_short = fs::metadata(path).is_ok_and(|data| data.is_file() && data.len() <= MOST_ADDRESS);
        if let (true, Ok(text)) = (is_short, fs::read_to_string(path)) {
            let address: Option<SocketAddr> =
                text.parse().ok().filter(|address: &SocketAddr| address.ip().is_loopback());
            let wrong =
                || HalError::BadGroup { expected: "an address on loopback".into(), got: path.display().to_string() };
            return address.ok_or_else(wrong);
        }
        thread::sleep(RETRY);
    }
    Err(HalError::RankSilent { rank: 0, limit, what: format!("joining the group by {}", path.display()) })
}

fn file_error(path: &Path, call: &'static str, error: &std::io::Error) -> HalError {
    HalError::File { path: path.to_owned(), call, message: error.to_string() }
}
