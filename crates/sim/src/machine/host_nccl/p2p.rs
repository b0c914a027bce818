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
use crate::race::OpAccess;

/// One rank's send or receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    is_send: bool,
    address: usize,
    count: usize,
    data_type: DataType,
    peer: usize,
}

/// Text for error messages.
impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { is_send, count, data_type, peer, .. } = self;
        let what = if *is_send { "send to" } else { "receive from" };
        write!(f, "a {what} rank {peer} of {count} {data_type:?}")
    }
}

/// Unmatched sends and receives from one rank to another, in order.
#[derive(Default)]
pub(super) struct Mailbox {
    sends: VecDeque<(Transfer, Rc<PendingOp>)>,
    recvs: VecDeque<(Transfer, Rc<PendingOp>)>,
}

impl Comm {
    /// Records that a rank's stream has reached a send or a receive; copies if the peer's has, too.
    pub(super) fn post(
        &self,
        core: &Core,
        rank: usize,
        transfer: Transfer,
        pending: Rc<PendingOp>,
    ) {
        let peer = transfer.peer;
        let pair = if transfer.is_send { (rank, peer) } else { (peer, rank) };
        let mut mailboxes = self.mailboxes.borrow_mut();
        let Mailbox { sends, recvs } = mailboxes.entry(pair).or_default();
        let queue = if transfer.is_send { &mut *sends } else { &mut *recvs };
        queue.push_back((transfer, pending));
        for queue in [&mut *sends, &mut *recvs] {
            queue.retain(|(_, pending)| !pending.is_cancelled());
        }
        if sends.is_empty() || recvs.is_empty() {
            return;
        }
        let (Some((send, sender)), Some((recv, receiver))) = (sends.pop_front(), recvs.pop_front())
        else {
            return;
        };
        drop(mailboxes);
        if (send.count, send.data_type) != (recv.count, recv.data_type) {
            let (from, to) = pair;
            let text = format!("rank {from} posts {send}, but rank {to} posts {recv}");
            return self.fail(&NcclError::usage(text));
        }
        let bytes = send.count * send.data_type.size();
        let checked = check(core, self.gpu(pair.0), send.address, bytes)
            .and_then(|()| check(core, self.gpu(pair.1), recv.address, bytes));
        if let Err(error) = checked {
            return core.fail_operation(send, error);
        }
        let read = core.access_by(&sender.race, send.address, bytes, OpAccess::Read);
        let written = core.access_by(&receiver.race, recv.address, bytes, OpAccess::Write);
        if read.and(written).is_err() {
            return;
        }
        // A send may end before its receive begins.
        receiver.learned.replace(sender.race.1.clone());
        // SAFETY: both buffers were checked, and no kernel runs now.
        unsafe { at(recv.address).copy_from(at(send.address), bytes) };
        sender.is_done.set(true);
        receiver.is_done.set(true);
    }
}

/// The arguments of `ncclSend` or `ncclRecv`.
struct TransferCall {
    name: &'static str,
    is_send: bool,
    address: usize,
    count: usize,
    data_type: c_int,
    peer: c_int,
    comm: RawComm,
    stream: RawStream,
}

impl TransferCall {
    fn launch(self) -> c_int {
        let Self { name, is_send, address, count, data_type: raw, peer, comm, stream } = self;
        call(name, comm, |cx| {
            cx.note(|| format!("{count} type {raw} peer {peer}"));
            let rank_comm = cx.live(comm)?;
            let (shared, _) = rank_comm.joined()?;
            let (data_type, peer) = (data_type(raw)?, shared.rank(peer, "peer")?);
            let too_many = || NcclError::argument(format!("{count} elements are too many"));
            let bytes = count.checked_mul(data_type.size()).ok_or_else(too_many)?;
            cx.check_access(&rank_comm, address, bytes)?;
            let stream = cx.stream(&rank_comm, stream)?;
            let op = Operation::Transfer(Transfer { is_send, address, count, data_type, peer });
            cx.launch(&rank_comm, |launches| launches.add(&rank_comm, stream, op, None))
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
    let (name, is_send, address) = ("ncclSend", true, from.expose_provenance());
    TransferCall { name, is_send, address, count, data_type, peer, comm, stream }.launch()
}

pub(super) unsafe extern "C" fn recv(
    to: *mut c_void,
    count: usize,
    data_type: c_int,
    peer: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    let (name, is_send, address) = ("ncclRecv", false, to.expose_provenance());
    TransferCall { name, is_send, address, count, data_type, peer, comm, stream }.launch()
}
