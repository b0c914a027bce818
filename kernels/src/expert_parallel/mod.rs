//! Expert parallelism: the tokens of all ranks go to the ranks of their experts ([`ep_dispatch`]),
//! where their rows are put in the order of the experts ([`ep_layout`]) for a grouped product, and
//! the experts' results return to the tokens' ranks, which add them up ([`ep_combine`]). Tokens go
//! as they are, or as 8-bit floats with scales (`rows.rs`).
//!
//! All ranks have equally many experts, rank 0 the first ones. A token has 1 to [`Shape::TOP_K`]
//! experts, with a weight each; its row is sent once to each rank that has one or more of them.
//! `docs/design.md` explains the protocols of the three forms:
//!
//! * For few tokens rows are [`Lamport`](nccl_device::Lamport) messages, and numbered messages
//!   (`numbered.rs`) say which rows are sent. A warp sends two parts of rows ahead of the one that
//!   it waits for, so that one code serves short and long messages. All blocks of a launch are
//!   resident, and each sends before it waits, so that every wait ends.
//! * For many tokens [`ep_dispatch_counted`] tells counts first, so that each row has an exact
//!   place (`places.rs`), and flags (`counted.rs`) follow the rows. [`ep_expand`] and
//!   [`ep_combine_counted`] do the rest.
//! * [`ep_dispatch_hybrid`] and [`ep_combine_hybrid`] are for several LSA teams, with messages over
//!   the network between them (`rail.rs`).
//!
//! -1 is no expert. Any other number that is no expert's is dropped, and so are rows for which
//! there is no room in the order of the experts. Both are counted in words that the host reads
//! ([`Faults`]).

pub mod counted;
mod counters;
pub mod ep_combine;
pub mod ep_combine_counted;
pub mod ep_combine_hybrid;
pub mod ep_dispatch;
pub mod ep_dispatch_counted;
pub mod ep_dispatch_hybrid;
pub mod ep_expand;
pub mod ep_layout;
pub mod numbered;
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

    pub(super) use super::{
        counted::*, counters::*, ep_layout::*, numbered::*, rail::*, rows::*, shape::*, sums::*,
    };
    pub(super) use crate::prelude::*;
}
