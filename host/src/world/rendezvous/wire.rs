//! The protocol of rendezvous connections: a frame is one byte of kind, four bytes of length, the
//! payload, and in a job with a token, once both ends have proved it, an
//! [authentication code](super::seal).

use std::io;

use devcomm_locate::NcclVersion;
use serde::{Deserialize, Serialize};

use super::relay::Ends;
use super::token::Nonce;

/// The most bytes of an exchange, all ranks together; each may have an [equal
/// part](max_contribution).
pub(crate) const MAX_PAYLOAD: usize = 64 << 20;

/// Returns the most bytes that each of some ranks can contribute: those of all, each after its
/// length as [`pack`] writes them, must fit into one frame.
pub(crate) fn max_contribution(n_ranks: usize) -> usize {
    (MAX_PAYLOAD / n_ranks.max(1)).saturating_sub(size_of::<u32>())
}

/// The largest key of a [subset](super::subset::Subset), in bytes: enough for a few nested subsets
/// of the largest number of ranks.
pub(super) const MAX_KEY: usize = 32 << 20;
/// The largest payload of a frame: an exchange, a subset's key, the key's length, the request
/// number.
pub(crate) const MAX_FRAME: usize = MAX_PAYLOAD + MAX_KEY + 16;
/// The largest payload before a connection is known to be a rank's.
pub(crate) const MAX_GREETING: usize = 4 << 10;

/// The kind of a frame. The numbers are not ASCII, so that no text of another protocol is a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Message to rank 0: a [`Hello`] that identifies the sender.
    Hello = 0xd1,
    /// Message from rank 0: the receiver has joined, others have not yet. Sent once a second.
    Waiting,
    /// Message from rank 0: all ranks have joined; the payload is the list of [`Member`]s.
    Welcome,
    /// Message from rank 0: the receiver is refused; the payload is the reason.
    Refused,
    /// Message from rank 0: some ranks did not connect in time, [`MissingRanks`].
    Missing,
    /// Message to rank 0: the sender's [`Contribution`] to an exchange.
    Contribute,
    /// Message to rank 0: the sender takes back the contribution with this header.
    Withdraw,
    /// Message from rank 0: the request number of the receiver's contribution, and all
    /// contributions.
    Gathered,
    /// Message to rank 0: the sender has done its work. From rank 0: all ranks have.
    Finished,
    /// Message to rank 0: the sender cannot continue; the payload is the reason.
    Failed,
    /// Message from rank 0: a rank is lost, [`LostRank`]. To rank 0: rank 0 itself is lost.
    Lost,
    /// Message in both directions, at intervals: the sender's process runs.
    Alive,
    /// Message from rank 0: a [`Challenge`](super::token::Challenge).
    Challenge,
    /// Message to rank 0: the proof that the sender has the job's token.
    Proof,
    /// Message from rank 0: another process relays this connection; the receiver may connect again
    /// without it.
    Relayed,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        use Kind::*;
        let all = [
            Hello, Waiting, Welcome, Refused, Missing, Contribute, Gathered, Finished, Failed,
            Lost, Alive, Challenge, Proof, Withdraw, Relayed,
        ];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// The first message of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub protocol: u32,
    pub job: String,
    pub rank: usize,
    pub n_ranks: usize,
    pub peer: Peer,
    /// The port of [`Member::address`].
    pub port: u16,
    pub ends: Ends,
    /// A random number, if the rank has a token.
    pub nonce: Option<Nonce>,
}

/// A rank that has joined.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Member {
    pub rank: usize,
    pub peer: Peer,
    /// Host and port at which it listens for the other ranks once one is lost.
    pub address: (String, u16),
}

/// The data about a rank that it sends to the other ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Peer {
    pub host: String,
    /// NCCL's version code.
    pub nccl: u32,
}

impl Peer {
    pub(crate) fn version(&self) -> NcclVersion {
        NcclVersion::from_code(self.nccl)
    }
}

/// The version of these frames.
pub(crate) const PROTOCOL: u32 = 4;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LostRank {
    pub rank: usize,
    pub why: String,
    /// Whether other ranks have waited for this rank until the deadline.
    pub absent: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MissingRanks {
    pub missing: Vec<usize>,
    pub waited_ms: u64,
    pub notes: Vec<String>,
}

/// The number of bytes before the payload of a frame.
pub(crate) const HEAD: usize = 5;

/// Returns what precedes a payload of `length` bytes.
pub(crate) fn header(kind: Kind, length: usize) -> io::Result<[u8; HEAD]> {
    if length > MAX_FRAME {
        return Err(bad(format!("a frame of {length} bytes is too long")));
    }
    let [a, b, c, d] = (length as u32).to_le_bytes();
    Ok([kind as u8, a, b, c, d])
}

/// Returns the kind of a frame and the length of its payload, at most `limit`.
pub(crate) fn read_header(head: [u8; HEAD], limit: usize) -> io::Result<(Kind, usize)> {
    let [kind, length @ ..] = head;
    let kind = Kind::from_byte(kind).ok_or_else(|| bad("not a rank of this program"))?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        return Err(bad(format!("a frame of {length} bytes, but at most {limit} are allowed")));
    }
    Ok((kind, length))
}

pub(crate) fn json(value: &impl Serialize) -> Vec<u8> {
    // The types of these frames can be written as JSON.
    serde_json::to_vec(value).unwrap_or_default()
}

pub(crate) fn parse<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> io::Result<T> {
    serde_json::from_slice(payload).map_err(|error| bad(format!("an invalid frame: {error}")))
}

/// One rank's contribution to an exchange.
#[derive(Debug, PartialEq)]
pub(crate) struct Contribution {
    /// The rank's number for this exchange, which the result repeats.
    pub request: u64,
    /// The key of the subset that exchanges.
    pub subset: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// Returns the payload of a contribution before its bytes.
pub(crate) fn contribution_header(request: u64, subset: &[u64]) -> Vec<u8> {
    let words = [request, subset.len() as u64];
    words.iter().chain(subset).flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn read_contribution(payload: &[u8]) -> io::Result<Contribution> {
    let invalid = || bad("an invalid contribution");
    let (request, rest) = request(payload)?;
    let (length, rest) = rest.split_first_chunk().ok_or_else(invalid)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok();
    let length = length.and_then(|length| length.checked_mul(size_of::<u64>()));
    let (subset, bytes) =
        length.and_then(|length| rest.split_at_checked(length)).ok_or_else(invalid)?;
    let (subset, _) = subset.as_chunks();
    let subset = subset.iter().map(|word| u64::from_le_bytes(*word)).collect();
    Ok(Contribution { request, subset, bytes: bytes.to_vec() })
}

/// Splits a payload into its request number and the rest.
pub(crate) fn request(payload: &[u8]) -> io::Result<(u64, &[u8])> {
    let (request, rest) =
        payload.split_first_chunk().ok_or_else(|| bad("a frame without a request number"))?;
    Ok((u64::from_le_bytes(*request), rest))
}

/// Returns all contributions to an exchange in one payload, each after its length. Each has at most
/// [`max_contribution`] bytes.
pub(crate) fn pack(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut payload = Vec::with_capacity(parts.iter().map(|part| 4 + part.len()).sum());
    for part in parts {
        payload.extend_from_slice(&(part.len() as u32).to_le_bytes());
        payload.extend_from_slice(part);
    }
    payload
}

/// Reads what [`pack`] has written.
pub(crate) fn unpack(mut payload: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let mut parts = Vec::new();
    while let Some((length, rest)) = payload.split_first_chunk() {
        let length = u32::from_le_bytes(*length) as usize;
        let part = rest.get(..length).ok_or_else(|| bad("an invalid exchange result"))?;
        parts.push(part.to_vec());
        payload = &rest[length..];
    }
    if payload.is_empty() { Ok(parts) } else { Err(bad("an invalid exchange result")) }
}

pub(crate) fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_read_as_it_was_written_and_garbage_is_refused() {
        let mut payload = contribution_header(7, &[1, 2, u64::MAX]);
        payload.extend_from_slice(b"bytes");
        let part =
            Contribution { request: 7, subset: vec![1, 2, u64::MAX], bytes: b"bytes".to_vec() };
        assert_eq!(read_contribution(&payload).unwrap(), part);
        assert!(read_contribution(&payload[..39]).is_err());
        assert!(read_contribution(&payload[..15]).is_err());
        assert!(read_contribution(&payload[..7]).is_err());
        for length in [6, u64::MAX, 1 << 61] {
            payload[8..16].copy_from_slice(&u64::to_le_bytes(length));
            assert!(read_contribution(&payload).is_err(), "{length}");
        }
    }

    #[test]
    fn an_exchange_is_packed_and_unpacked() {
        let parts = vec![b"one".to_vec(), Vec::new(), b"three".to_vec()];
        assert_eq!(unpack(&pack(&parts)).unwrap(), parts);
        let packed = pack(&parts);
        assert!(unpack(&packed[..packed.len() - 1]).is_err());
        assert!(unpack(&packed[..packed.len() - 7]).is_err());
    }
}
