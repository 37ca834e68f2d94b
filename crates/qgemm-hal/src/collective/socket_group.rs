//! Ranks that are processes of one machine, over TCP on loopback.
//!
//! Rank 0 is the hub: it reads the message of each rank, and
//! sends all messages to each.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::exchange::{Exchange, Message};
use crate::error::HalError;

/// First bytes of a connection, with the version of the protocol.
const GREETING: &[u8; 8] = b"qgemm-1\n";
/// Longest text of a message.
const MOST_TEXT: u64 = 1 << 16;
/// Longest operand of a message.
const MOST_BYTES: u64 = 1 << 34;
/// Time between attempts to connect.
const RETRY: Duration = Duration::from_millis(5);
/// How long a stranger may take to greet.
const GREETING_LIMIT: Duration = Duration::from_secs(2);

/// A rank of a group.
#[derive(Debug)]
pub struct SocketRank {
    rank: usize,
    world: usize,
    limit: Duration,
    /// Connections of rank 0 to all others in order, or of another to
    /// rank 0.
    sockets: Vec<TcpStream>,
    /// The error that ended the group. Locked during an exchange.
    failed: Mutex<Option<HalError>>,
}

impl SocketRank {
    /// Rank 0 of `world`: waits for the others at `listener`.
    ///
    /// # Errors
    /// [`HalError::RankSilent`] when one does not come,
    /// [`HalError::CollectiveMismatch`] when one is of another group.
    pub fn host(listener: &TcpListener, world: usize, limit: Duration) -> Result<Self, HalError> {
        let deadline = Instant::now() + limit;
        listener.set_nonblocking(true).map_err(|error| group_error("listen", &error))?;
        let mut ranks: Vec<Option<TcpStream>> = (1..world).map(|_| None).collect();
        while let Some(missing) = ranks.iter().position(Option::is_none) {
            match listener.accept() {
                Ok((socket, _)) => {
                    if let Some((rank, socket)) = greeted(socket, world)? {
                        let place = &mut ranks[rank - 1];
                        if place.is_some() {
                            let expected = format!("{world} different ranks");
                            return Err(HalError::BadGroup { expected, got: format!("rank {rank} twice") });
                        }
                        *place = Some(socket);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    thread::sleep(RETRY);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(HalError::RankSilent { rank: missing + 1, limit, what: "joining the group".into() });
                }
                Err(error) => return Err(group_error("accept", &error)),
            }
        }
        Ok(Self { rank: 0, world, limit, sockets: ranks.into_iter().flatten().collect(), failed: Mutex::new(None) })
    }

    /// Rank `rank` of `world`, whose rank 0 listens at `address`.
    ///
    /// # Errors
    /// [`HalError::RankSilent`] when nobody listens,
    /// [`HalError::RankGone`] when it refuses.
    pub fn join(address: SocketAddr, [rank, world]: [usize; 2], limit: Duration) -> Result<Self, HalError> {
        let deadline = Instant::now() + limit;
        let silent = || HalError::RankSilent { rank: 0, limit, what: format!("joining the group at {address}") };
        let mut socket = loop {
            match TcpStream::connect_timeout(&address, limit) {
                Ok(socket) => break socket,
                Err(_) if Instant::now() < deadline => thread::sleep(RETRY),
                Err(_) => return Err(silent()),
            }
        };
        let numbers = [rank, world].map(|number| (number as u64).to_le_bytes()).concat();
        let greeting = [&GREETING[..], &numbers].concat();
        let accepted = prepare(&socket, limit).and_then(|()| socket.write_all(&greeting)).and_then(|()| {
            let mut answer = [0];
            read_until(&socket, &mut answer, deadline).map(|()| answer == [1])
        });
        match accepted {
            Ok(true) => Ok(Self { rank, world, limit, sockets: vec![socket], failed: Mutex::new(None) }),
            Ok(false) => Err(HalError::RankGone { rank: 0, why: format!("it is not of a group of {world} ranks") }),
            Err(error) if is_timeout(&error) => Err(silent()),
            Err(error) => Err(HalError::RankGone { rank: 0, why: error.to_string() }),
        }
    }

    /// Rank at the other end of a connection.
    fn peer(&self, socket: usize) -> usize {
        if self.rank == 0 { socket + 1 } else { 0 }
    }

    fn error(&self, rank: usize, what: &str, error: &io::Error) -> HalError {
        match is_timeout(error) {
            true => HalError::RankSilent { rank, limit: self.limit, what: what.to_owned() },
            false if error.kind() == io::ErrorKind::UnexpectedEof => {
                HalError::RankGone { rank, why: "its connection closed".into() }
            }
            false => HalError::RankGone { rank, why: error.to_string() },
        }
    }

    fn receive(&self, socket: usize, what: &str, deadline: Instant) -> Result<Message, HalError> {
        let rank = self.peer(socket);
        match receive(&self.sockets[socket], deadline) {
            Ok(Ok(message)) => Ok(message),
            Ok(Err(why)) => Err(HalError::RankGone { rank, why }),
            Err(error) => Err(self.error(rank, what, &error)),
        }
    }

    fn send(&self, socket: usize, what: &str, message: &Message) -> Result<(), HalError> {
        let sent = send(&self.sockets[socket], 0, message);
        sent.map_err(|error| self.error(self.peer(socket), what, &error))
    }

    fn through_hub(&self, message: Message, deadline: Instant) -> Result<Vec<Arc<Message>>, HalError> {
        let what = message.about.clone();
        if self.rank != 0 {
            self.send(0, &what, &message)?;
            return (0..self.world).map(|_| self.receive(0, &what, deadline).map(Arc::new)).collect();
        }
        let mut all = vec![Arc::new(message)];
        for socket in 0..self.sockets.len() {
            all.push(Arc::new(self.receive(socket, &what, deadline)?));
        }
        for socket in 0..self.sockets.len() {
            all.iter().try_for_each(|message| self.send(socket, &what, message))?;
        }
        Ok(all)
    }

    /// Tells the others that the group has ended.
    fn close(&self, why: &str) {
        let message = Message { about: why.to_owned(), bytes: Vec::new() };
        for socket in &self.sockets {
            // A rank that is gone hears nothing.
            let _ = send(socket, 1, &message);
            let _ = socket.shutdown(Shutdown::Write);
        }
    }
}

impl Exchange for SocketRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn exchange(&self, message: Message) -> Result<Vec<Arc<Message>>, HalError> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &*failed {
            return Err(error.clone());
        }
        let all = self.through_hub(message, Instant::now() + self.limit);
        if let Err(error) = &all {
            *failed = Some(error.clone());
            self.close(&error.to_string());
        }
        all
    }

    fn check(&self) -> Result<(), HalError> {
        // During an exchange, that finds who is gone.
        let Ok(mut failed) = self.failed.try_lock() else { return Ok(()) };
        if let Some(error) = &*failed {
            return Err(error.clone());
        }
        for (place, socket) in self.sockets.iter().enumerate() {
            let peeked = socket.set_nonblocking(true).and_then(|()| {
                let peeked = socket.peek(&mut [0]);
                socket.set_nonblocking(false).and(peeked)
            });
            if matches!(peeked, Ok(0)) {
                let error = HalError::RankGone { rank: self.peer(place), why: "its connection closed".into() };
                *failed = Some(error.clone());
                self.close(&error.to_string());
                return Err(error);
            }
        }
        Ok(())
    }

    fn abort(&self, why: &str) {
        let Ok(mut failed) = self.failed.try_lock() else {
            // An exchange is under way, and ends with this.
            self.sockets.iter().for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
            return;
        };
        if failed.is_none() {
            *failed = Some(HalError::RankGone { rank: self.rank, why: why.to_owned() });
            self.close(why);
        }
    }
}

/// Rank of a connection that greets as one of a group of `world`;
/// `None` for a stranger.
fn greeted(mut socket: TcpStream, world: usize) -> Result<Option<(usize, TcpStream)>, HalError> {
    let mut greeting = [0; GREETING.len() + 16];
    let read = socket
        .set_nonblocking(false)
        .and_then(|()| prepare(&socket, GREETING_LIMIT))
        .and_then(|()| read_until(&socket, &mut greeting, Instant::now() + GREETING_LIMIT));
    if read.is_err() || !greeting.starts_with(GREETING) {
        return Ok(None);
    }
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| greeting[GREETING.len() + at + i]));
    let (rank, of) = (number(0), number(8));
    let is_one = of == world as u64 && (1..of).contains(&rank);
    let answered = socket.write_all(&[u8::from(is_one)]);
    match (is_one, answered) {
        (true, Ok(())) => Ok(Some((rank as usize, socket))),
        (true, Err(error)) => Err(HalError::RankGone { rank: rank as usize, why: error.to_string() }),
        (false, _) => Err(HalError::CollectiveMismatch {
            rank: rank as usize,
            expected: format!("a rank of {world}"),
            got: format!("rank {rank} of {of}"),
        }),
    }
}

fn prepare(socket: &TcpStream, limit: Duration) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_write_timeout(Some(limit.max(RETRY)))
}

fn send(mut socket: &TcpStream, kind: u8, message: &Message) -> io::Result<()> {
    let Message { about, bytes } = message;
    let mut head = vec![kind];
    head.extend((about.len() as u64).to_le_bytes());
    head.extend((bytes.len() as u64).to_le_bytes());
    head.extend(about.as_bytes());
    socket.write_all(&head)?;
    socket.write_all(bytes)
}

/// A message, or the reason why its rank ended the group.
fn receive(socket: &TcpStream, deadline: Instant) -> io::Result<Result<Message, String>> {
    let mut head = [0; 17];
    read_until(socket, &mut head, deadline)?;
    let length = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    let (text, bytes) = (length(1), length(9));
    if text > MOST_TEXT || bytes > MOST_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "its message is too long"));
    }
    let mut about = vec![0; text as usize];
    read_until(socket, &mut about, deadline)?;
    let about = String::from_utf8_lossy(&about).into_owned();
    if head[0] != 0 {
        return Ok(Err(about));
    }
    let mut message = Message { about, bytes: Vec::new() };
    // Memory grows with what came, not with what was announced.
    let mut left = bytes as usize;
    while left > 0 {
        let (start, part) = (message.bytes.len(), left.min(1 << 20));
        message.bytes.resize(start + part, 0);
        read_until(socket, &mut message.bytes[start..], deadline)?;
        left -= part;
    }
    Ok(Ok(message))
}

/// Fills `bytes`, waiting until `deadline`.
fn read_until(mut socket: &TcpStream, mut bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.read(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

fn group_error(call: &str, error: &io::Error) -> HalError {
    HalError::BadGroup { expected: "a group on loopback".into(), got: format!("{call}: {error}") }
}
