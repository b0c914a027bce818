//! Sends and receives.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::rc::Rc;

use devcomm_sys::nccl::{RawComm, RawStream};
use devcomm_types::DataType;

use super::batch::{Operation, PendingOp};
use super::call::{NcclError, call};
use super::collective::{at, check, data_type};
use super::comm::Comm;
use crate::machine::core::Core;

/// One rank's send or receive.
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

/// Unmatched sends and receives from one rank to another, in order.
#[derive(Default)]
pub(super) struct Mailbox {
    sent: VecDeque<(Transfer, Rc<PendingOp>)>,
    wanted: VecDeque<(Transfer, Rc<PendingOp>)>,
}

impl Comm {
    /// A rank's stream has reached a send or a receive.
    pub(super) fn post(
        &self,
        core: &Core,
        rank: usize,
        transfer: Transfer,
        pending: Rc<PendingOp>,
    ) {
        let peer = transfer.peer;
        let pair = if transfer.sends { (rank, peer) } else { (peer, rank) };
        let mut mailboxes = self.mailboxes.borrow_mut();
        let Mailbox { sent, wanted } = mailboxes.entry(pair).or_default();
        let own = if transfer.sends { &mut *sent } else { &mut *wanted };
        own.push_back((transfer, pending));
        for half in [&mut *sent, &mut *wanted] {
            half.retain(|(_, pending)| !pending.is_cancelled());
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
            return self.fail(&NcclError::usage(text));
        }
        let bytes = send.count * send.data_type.size();
        let checked = check(core, self.gpu(pair.0), send.address, bytes)
            .and_then(|()| check(core, self.gpu(pair.1), recv.address, bytes));
        if let Err(error) = checked {
            return core.fail_with(error);
        }
        // SAFETY: both sides were checked, and no kernel runs meanwhile.
        unsafe { at(recv.address).copy_from(at(send.address), bytes) };
        sender.is_done.set(true);
        receiver.is_done.set(true);
    }
}

/// The arguments of a call.
struct TransferCall {
    name: &'static str,
    sends: bool,
    address: usize,
    count: usize,
    data_type: c_int,
    peer: c_int,
    comm: RawComm,
    stream: RawStream,
}

impl TransferCall {
    fn launch(self) -> c_int {
        let Self { name, sends, address, count, data_type: on, peer, comm, stream } = self;
        call(name, comm, |cx| {
            cx.note(|| format!("{count} type {on} peer {peer}"));
            let rank_comm = cx.live(comm)?;
            let (shared, _) = rank_comm.joined()?;
            let (data_type, peer) = (data_type(on)?, shared.rank(peer, "peer")?);
            let bytes = count.checked_mul(data_type.size());
            let bytes = bytes.ok_or_else(|| NcclError::argument(format!("{count} elements")))?;
            cx.reached(&rank_comm, address, bytes)?;
            let stream = cx.stream(&rank_comm, stream)?;
            let own = Operation::Transfer(Transfer { sends, address, count, data_type, peer });
            cx.launch(&rank_comm, |launches| launches.add(&rank_comm, stream, own, None))
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
    TransferCall { name, sends, address, count, data_type, peer, comm, stream }.launch()
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
    TransferCall { name, sends, address, count, data_type, peer, comm, stream }.launch()
}
