//! Collectives: operations of all ranks of a group, and the
//! groups.

mod communicator;
mod exchange;
mod host;
mod rendezvous;
mod socket_group;
mod thread_group;

pub use communicator::{Collective, Communicator};
pub use exchange::{Exchange, Message};
pub use host::HostCommunicator;
pub use rendezvous::Rendezvous;
pub use thread_group::{Latency, ThreadGroup};
