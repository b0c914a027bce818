//! Expert parallelism: the tokens of all ranks go to the ranks of their experts ([`ep_dispatch`]),
//! where their rows are put in the order of the experts ([`ep_layout`]) for a grouped product, and
//! the experts' results return to the tokens' ranks, which add them up ([`ep_combine`]). Tokens go
//! as they are, or as 8-bit floats with scales (`rows.rs`).
//!
//! All ranks have equally many experts, rank 0 the first ones. A token has 1 to [`Shape::TOP_K`]
//! experts, with a weight each; its row is sent once to each rank that has one or more of them.
//!
//! # The protocol
//!
//! Rows need no flags: they are [`Lamport`](nccl_device::Lamport) messages, whose data itself shows
//! that they have arrived. Each vector of 16 bytes of a row has a slot of its own in the receiver's
//! memory, which the sender's rank, the token's number and the vector's place in the row give. So
//! no rank has to count before the first row leaves, and a row takes one-way latency. Numbered
//! messages say which rows are sent: how many tokens each rank has, and for each token and expert
//! whether the row is sent, the expert and the weight. They have the number of the launch in them
//! (`numbered.rs`), and are not emptied, since many warps read them. Counts also tell a rank that
//! the peer's last launch has ended, as a session of Lamport messages needs.
//!
//! A warp sends a part of a row, and receives the same part of the peers' rows. It sends two parts
//! ahead of the one that it waits for, so that one code serves short and long messages: enough of a
//! long one is in flight to fill NVLink. All blocks of a launch are resident, and each sends before
//! it waits for a message, so that every wait ends; grids may differ between ranks.
//!
//! # High throughput
//!
//! Where memory and bandwidth matter more than latency, [`ep_dispatch_counted`] tells counts first,
//! so that each row has an exact place in the order of the receiver's experts, which the sender
//! knows (`places.rs`). Rows arrive there by plain stores, and flags (`counted.rs`) follow them.
//! [`ep_expand`] copies a row to the other experts that its token has in the rank, and
//! [`ep_combine_counted`] returns the results. Since rows have places by counts, a rank's buffers
//! need room only for the rows that it receives, not for the most tokens that each rank may have.
//!
//! # Several LSA teams
//!
//! Where load and store do not reach all ranks, [`ep_dispatch_hybrid`] and [`ep_combine_hybrid`] do
//! the same over the network between the teams (`rail.rs`), with stores and barriers within a team.
//! A row crosses the network once for each team that has one of the token's experts, and so does
//! what comes back: the sum of the team. [`ep_layout`] and what it reads are the same.
//!
//! # Wrong routing
//!
//! -1 is no expert. Any other number that is no expert's is dropped, and so are rows for which
//! there is no room in the order of the experts. Both are counted in words that the host reads
//! ([`Faults`]).

mod combine_receive;
pub mod counted;
mod counters;
mod counts;
mod dispatch_receive;
pub mod ep_combine;
pub mod ep_combine_counted;
pub mod ep_combine_hybrid;
pub mod ep_dispatch;
pub mod ep_dispatch_counted;
pub mod ep_dispatch_hybrid;
pub mod ep_expand;
pub mod ep_layout;
pub mod numbered;
mod parts;
mod places;
pub mod rail;
mod rows;
pub mod shape;
pub mod sums;

pub use self::counted::Counted;
pub use self::numbered::{Messages, words as numbered_words};
pub use self::rail::{Mail, Relayed};
pub use self::rows::SCALED;
pub use self::shape::{Faults, RANKS, Received, Shape, Steps, Tokens};
pub use self::sums::Results;

/// The names that many files use.
mod prelude {
    pub(super) use core::hint::assert_unchecked;
    pub(super) use cuda_std::atomic::Order;
    pub(super) use cuda_std::strided::share;

    pub(super) use super::counted::{Counted, Progress, Step};
    pub(super) use super::counters::{Counters, UNROLL, UNROLLED, Words, store_returns, strided};
    pub(super) use super::ep_layout::{DROPPED, Grouped, NONE, RETURN_WORDS, positions};
    pub(super) use super::numbered::{Messages, Session};
    pub(super) use super::parts::{Part, Parts, Share, block_warps, warp_index, warps};
    pub(super) use super::rail::{Batch, Mail, Rail, Relayed, position};
    pub(super) use super::rows::{self, Payload, Rows, SCALED};
    pub(super) use super::shape::{Faults, RANKS, Ranks, Received, Shape, Steps, Tokens};
    pub(super) use super::shape::{ranks, rolled, with_ranks};
    pub(super) use super::sums::{Entries, Results, Row, Sums, add, add_rows, prefetch, sum};
    pub(super) use crate::prelude::*;
}
