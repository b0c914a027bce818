//! Sends and receives.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::rc::Rc;

use devcomm_sys::nccl::{RawComm, RawStream};
use devcomm_types::DataType;

use super::batch::{Operation, Ticket};
use super::call::{Refusal, call};
use super::collective::{at, check, data_type};
use super::comm::Comm;
use crate::machine::core::Core;

/// One rank's half.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    sends: bool,
    address: usize,
    count: usize,
    data_type: DataType,
    peer: usize,
}

/// For reports.
impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sends, count, data_type, peer, .. } = self;
        let what = if *sends { "send to" } else { "receive from" };
        write!(f, "a {what} rank {peer} of {count} {data_type:?}")
    }
}

/// What one rank has sent another, and what that one has asked for, in order.
#[derive(Default)]
pub(super) struct Mailbox {
    sent: VecDeque<(Transfer, Rc<Ticket>)>,
    wanted: VecDeque<(Transfer, Rc<Ticket>)>,
}

impl Comm {
    /// A rank's stream has come to a send or a receive.
    pub(super) fn post(&self, core: &Core, rank: usize, transfer: Transfer, ticket: Rc<Ticket>) {
        let peer = transfer.peer;
        let pair = if transfer.sends { (rank, peer) } else { (peer, rank) };
        let mut mailboxes = self.mailboxes.borrow_mut();
        let Mailbox { sent, wanted } = mailboxes.entry(pair).or_default();
        let own = if transfer.sends { &mut *sent } else { &mut *wanted };
        own.push_back((transfer, ticket));
        for half in [&mut *sent, &mut *wanted] {
            half.retain(|(_, ticket)| !ticket.is_cut());
        }
        if sent.is_empty() || wanted.is_empty() {
            return;
        }
        let (Some((send, sender)), Some((recv, receiver))) = (sent.pop_front(), wanted.pop_front())
        else {
            return;
        };
        drop(mailboxes);
        if (send.count, send.data_type) != (recv.count, recv.data_type) {
            let (from, to) = pair;
            let text = format!("rank {from} makes {send}, but rank {to} makes {recv}");
            return self.fail(&Refusal::usage(text));
        }
        let bytes = send.count * send.data_type.size();
        let checked = check(core, self.gpu(pair.0), send.address, bytes)
            .and_then(|()| check(core, self.gpu(pair.1), recv.address, bytes));
        if let Err(refusal) = checked {
            return core.fail_with(refusal);
        }
        // SAFETY: both sides were checked, and no kernel runs meanwhile.
        unsafe { at(recv.address).copy_from(at(send.address), bytes) };
        sender.is_done.set(true);
        receiver.is_done.set(true);
    }
}

/// A call as it comes.
struct Raw {
    name: &'static str,
    sends: bool,
    address: usize,
    count: usize,
    data_type: c_int,
    peer: c_int,
    comm: RawComm,
    stream: RawStream,
}

impl Raw {
    fn launch(self) -> c_int {
        let Self { name, sends, address, count, data_type: on, peer, comm, stream } = self;
        call(name, comm, |ask| {
            ask.note(|| format!("{count} type {on} peer {peer}"));
            let member = ask.live(comm)?;
            let (group, _) = member.place()?;
            let (data_type, peer) = (data_type(on)?, group.rank(peer, "peer")?);
            let bytes = count.checked_mul(data_type.size());
            let bytes = bytes.ok_or_else(|| Refusal::argument(format!("{count} elements")))?;
            ask.reached(&member, address, bytes)?;
            let stream = ask.stream(&member, stream)?;
            let own = Operation::Transfer(Transfer { sends, address, count, data_type, peer });
            ask.launch(&member, |launches| launches.add(&member, stream, own, None))
        })
    }
}

pub(super) unsafe extern "C" fn send(
    from: *const c_void,
    count: usize,
    data_type: c_int,
    peer: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    let (name, sends, address) = ("ncclSend", true, from.expose_provenance());
    Raw { name, sends, address, count, data_type, peer, comm, stream }.launch()
}

pub(super) unsafe extern "C" fn recv(
    to: *mut c_void,
    count: usize,
    data_type: c_int,
    peer: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    let (name, sends, address) = ("ncclRecv", false, to.expose_provenance());
    Raw { name, sends, address, count, data_type, peer, comm, stream }.launch()
}
