//! [`HostCommunicator`]: collectives through host memory, on any
//! device.

use std::sync::Arc;

use qgemm_formats::DType;

use super::communicator::{Collective, Communicator};
use super::exchange::{Exchange, Message};
use crate::buffer::{BufferMut, BufferRef};
use crate::device::{Device, Stream};
use crate::error::HalError;

/// Communicator whose operands pass through host memory.
///
/// Every rank adds the operands of all ranks in the order of
/// ranks, in f32, so that all have the same bits in every run. A
/// collective waits for the stream, and is complete on return.
#[derive(Debug)]
pub struct HostCommunicator {
    exchange: Box<dyn Exchange>,
}

impl HostCommunicator {
    /// Collectives over an exchange.
    pub fn new(exchange: impl Exchange + 'static) -> Self {
        Self { exchange: Box::new(exchange) }
    }

    /// The exchange, for messages besides collectives.
    pub fn exchange(&self) -> &dyn Exchange {
        &*self.exchange
    }

    /// Messages of all ranks, which are about the same.
    fn messages(&self, message: Message) -> Result<Vec<Arc<Message>>, HalError> {
        let about = message.about.clone();
        let all = self.exchange.exchange(message)?;
        match all.iter().position(|other| other.about != about) {
            None => Ok(all),
            Some(rank) => {
                let error = HalError::CollectiveMismatch { rank, expected: about, got: all[rank].about.clone() };
                // The others find the difference, too, as this exchange is
                // complete.
                self.exchange.abort(&error.to_string());
                Err(error)
            }
        }
    }
}

impl Communicator for HostCommunicator {
    fn rank(&self) -> usize {
        self.exchange.rank()
    }

    fn world(&self) -> usize {
        self.exchange.world()
    }

    fn submit(
        &self,
        device: &dyn Device,
        stream: &Stream,
        collective: &Collective,
        x: Option<BufferRef<'_>>,
        mut d: BufferMut<'_>,
    ) -> Result<(), HalError> {
        let (rank, world) = (self.rank(), self.world());
        collective.check([rank, world], x.as_ref().map_or(0, |x| x.len()), d.view().len())?;
        let mut bytes = vec![0; brought(collective, rank)];
        device.download(stream, x.unwrap_or_else(|| d.view()), &mut bytes)?;
        let all = self.messages(Message { about: collective.to_string(), bytes })?;
        if let Some(rank) = (0..world).find(|rank| all[*rank].bytes.len() != brought(collective, *rank)) {
            let (expected, got) = (collective.to_string(), format!("{} bytes of it", all[rank].bytes.len()));
            return Err(HalError::CollectiveMismatch { rank, expected, got });
        }
        let d_bytes = collective.bytes(rank).map_or(0, |[_, d]| d);
        let result = match collective {
            Collective::AllReduce { dtype, .. } => sum(*dtype, &all, 0..d_bytes),
            Collective::AllGather { dtype, rows, columns } => gathered(*rows, columns, dtype.bytes(), &all),
            Collective::ReduceScatter { dtype, counts } => {
                let first = counts[..rank].iter().sum::<usize>() * dtype.bytes();
                sum(*dtype, &all, first..first + d_bytes)
            }
            Collective::Broadcast { root, .. } => all[*root].bytes.clone(),
        };
        device.upload(stream, &result, d.reborrow())
    }

    fn algorithm(&self, _: &Collective) -> &'static str {
        "host_memory"
    }

    fn agree(&self, what: &str) -> Result<(), HalError> {
        self.messages(Message { about: what.to_owned(), bytes: Vec::new() }).map(drop)
    }

    fn abort(&self, why: &str) {
        self.exchange.abort(why);
    }
}

/// Bytes that a rank brings to a collective.
fn brought(collective: &Collective, rank: usize) -> usize {
    let [x, d] = collective.bytes(rank).unwrap_or_default();
    match collective {
        Collective::AllGather { .. } | Collective::ReduceScatter { .. } => x,
        Collective::Broadcast { root, .. } if *root != rank => 0,
        _ => d,
    }
}

/// Sum of a range of all operands, in the order of ranks.
fn sum(dtype: DType, all: &[Arc<Message>], range: std::ops::Range<usize>) -> Vec<u8> {
    let mut operands = all.iter().map(|message| dtype.decode(&message.bytes[range.clone()]));
    let mut total = operands.next().unwrap_or_default();
    for operand in operands {
        total.iter_mut().zip(operand).for_each(|(total, value)| *total += value);
    }
    dtype.encode(&total)
}

/// Rows of all operands side by side.
fn gathered(rows: usize, columns: &[usize], element: usize, all: &[Arc<Message>]) -> Vec<u8> {
    let parts = |row: usize| {
        let part = move |(message, columns): (&Arc<Message>, &usize)| {
            let bytes = columns * element;
            message.bytes[row * bytes..(row + 1) * bytes].to_vec()
        };
        all.iter().zip(columns).flat_map(part)
    };
    (0..rows).flat_map(parts).collect()
}
