//! What goes over a rendezvous connection: frames of one byte of kind, four of length, and the
//! payload.

use std::io::{self, Read, Write};

use devcomm_locate::NcclVersion;
use serde::{Deserialize, Serialize};

use super::subset::MAX_KEY;

/// What all ranks give in an exchange, together.
pub(crate) const MAX_PAYLOAD: usize = 64 << 20;
/// Largest payload of a frame: an exchange, a subset's key, the ticket and the key's length.
pub(crate) const MAX_FRAME: usize = MAX_PAYLOAD + MAX_KEY + 16;
/// Largest payload before a connection is known to be a rank's.
pub(crate) const MAX_GREETING: usize = 4 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// To rank 0: who I am.
    Hello = 0xd1,
    /// From rank 0: you have joined; others are awaited. Sent once a second.
    Waiting,
    /// From rank 0: all ranks have joined.
    Welcome,
    /// From rank 0: you are refused; the payload says why.
    Refused,
    /// From rank 0: some ranks did not arrive; the payload lists them.
    Missing,
    /// To rank 0: my part of an exchange, a [`Contribution`].
    Give,
    /// From rank 0: the ticket that came with your part, and all parts.
    Gathered,
    /// To rank 0: I have done my work. From rank 0: all have.
    Finished,
    /// To rank 0: I cannot continue, because.
    Failed,
    /// From rank 0: a rank is lost.
    Lost,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        use Kind::*;
        [Hello, Waiting, Welcome, Refused, Missing, Give, Gathered, Finished, Failed, Lost]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// A rank's greeting.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub protocol: u32,
    pub job: String,
    pub rank: usize,
    pub n_ranks: usize,
    pub peer: Peer,
}

/// What the others learn of a rank.
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
pub(crate) const PROTOCOL: u32 = 2;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LostRank {
    pub rank: usize,
    pub why: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MissingRanks {
    pub missing: Vec<usize>,
    pub waited_ms: u64,
    pub notes: Vec<String>,
}

pub(crate) fn send(to: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    send_all(to, kind, &[payload])
}

/// Sends a payload that is in several pieces.
pub(crate) fn send_all(to: &mut impl Write, kind: Kind, pieces: &[&[u8]]) -> io::Result<()> {
    let length: usize = pieces.iter().map(|piece| piece.len()).sum();
    if length > MAX_FRAME {
        return Err(bad(format!("a frame of {length} bytes is too long")));
    }
    // One write, so that the frame leaves in one piece.
    let mut frame = Vec::with_capacity(5 + length);
    frame.push(kind as u8);
    frame.extend_from_slice(&(length as u32).to_le_bytes());
    pieces.iter().for_each(|piece| frame.extend_from_slice(piece));
    to.write_all(&frame)
}

pub(crate) fn send_json(to: &mut impl Write, kind: Kind, value: &impl Serialize) -> io::Result<()> {
    send(to, kind, &serde_json::to_vec(value)?)
}

pub(crate) fn receive(from: &mut impl Read, limit: usize) -> io::Result<(Kind, Vec<u8>)> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let kind = Kind::from_byte(kind).ok_or_else(|| bad("not a rank of this program"))?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        return Err(bad(format!("a frame of {length} bytes, where {limit} are allowed")));
    }
    let mut payload = Vec::new();
    from.take(length as u64).read_to_end(&mut payload)?;
    if payload.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((kind, payload))
}

pub(crate) fn parse<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> io::Result<T> {
    serde_json::from_slice(payload).map_err(|error| bad(format!("garbled frame: {error}")))
}

/// One rank's part of an exchange.
#[derive(Debug, PartialEq)]
pub(crate) struct Contribution {
    /// The rank's number for it, which comes back with the result.
    pub ticket: u64,
    /// The key of the subset whose exchange it is.
    pub subset: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// What stands before the bytes of a part.
pub(crate) fn contribution_header(ticket: u64, subset: &[u64]) -> Vec<u8> {
    let words = [ticket, subset.len() as u64];
    words.iter().chain(subset).flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn read_contribution(payload: &[u8]) -> io::Result<Contribution> {
    let garbled = || bad("a garbled part of an exchange");
    let (ticket, rest) = ticket(payload)?;
    let (length, rest) = rest.split_first_chunk().ok_or_else(garbled)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok();
    let length = length.and_then(|length| length.checked_mul(size_of::<u64>()));
    let (subset, bytes) =
        length.and_then(|length| rest.split_at_checked(length)).ok_or_else(garbled)?;
    let (subset, _) = subset.as_chunks();
    let subset = subset.iter().map(|word| u64::from_le_bytes(*word)).collect();
    Ok(Contribution { ticket, subset, bytes: bytes.to_vec() })
}

/// The ticket at the front of a payload, and the rest.
pub(crate) fn ticket(payload: &[u8]) -> io::Result<(u64, &[u8])> {
    let (ticket, rest) =
        payload.split_first_chunk().ok_or_else(|| bad("a frame with no ticket"))?;
    Ok((u64::from_le_bytes(*ticket), rest))
}

/// All parts of an exchange in one payload: each with its length before it.
pub(crate) fn pack(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut payload = Vec::with_capacity(parts.iter().map(|part| 4 + part.len()).sum());
    for part in parts {
        payload.extend_from_slice(&(part.len() as u32).to_le_bytes());
        payload.extend_from_slice(part);
    }
    payload
}

pub(crate) fn unpack(mut payload: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let mut parts = Vec::new();
    while let Some((length, rest)) = payload.split_first_chunk() {
        let length = u32::from_le_bytes(*length) as usize;
        let part = rest.get(..length).ok_or_else(|| bad("garbled exchange"))?;
        parts.push(part.to_vec());
        payload = &rest[length..];
    }
    if payload.is_empty() { Ok(parts) } else { Err(bad("garbled exchange")) }
}

pub(crate) fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_arrives_as_it_was_sent() {
        let mut buffer = Vec::new();
        send(&mut buffer, Kind::Give, b"abc").unwrap();
        send(&mut buffer, Kind::Finished, b"").unwrap();
        let mut from = buffer.as_slice();
        assert_eq!(receive(&mut from, 16).unwrap(), (Kind::Give, b"abc".to_vec()));
        assert_eq!(receive(&mut from, 16).unwrap(), (Kind::Finished, Vec::new()));
        assert_eq!(receive(&mut from, 16).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn garbage_is_an_error_and_allocates_nothing() {
        for bytes in
            [&b"GET / HTTP/1.1\r\n"[..], &[0xd1, 255, 255, 255, 255], &[0xd1, 9, 0, 0, 0, 1]]
        {
            assert!(receive(&mut &bytes[..], MAX_GREETING).is_err());
        }
    }

    #[test]
    fn a_part_is_read_as_it_was_written_and_garbage_is_refused() {
        let mut payload = contribution_header(7, &[1, 2, u64::MAX]);
        payload.extend_from_slice(b"bytes");
        let part =
            Contribution { ticket: 7, subset: vec![1, 2, u64::MAX], bytes: b"bytes".to_vec() };
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
