//! Exchange of bytes between the ranks of a communicator on the host, without NCCL.
//!
//! With its bytes each rank sends what it calls, a text. If the texts differ, the exchange fails on
//! all ranks. In *checked* worlds each collective of NCCL is preceded by an exchange of such a text
//! alone, which contains its count, type, operator and root.

use std::sync::Arc;

use bytemuck::Pod;

use crate::error::{Error, Result, WorldError};

/// The bytes that each rank sent, in rank order.
pub(crate) type Gathered = Arc<Vec<Vec<u8>>>;

/// Fails when a rank is not to wait for an exchange any longer.
pub(crate) type Cancelled<'a> = &'a dyn Fn() -> Result<()>;

/// For exchanges that end only with the other ranks.
pub(crate) const NEVER: Cancelled<'static> = &|| Ok(());

/// A set of ranks that exchange bytes, including this rank. All of them must make the same calls in
/// the same order.
pub(crate) trait Peers: Send + Sync {
    /// The hosts of all ranks.
    fn hosts(&self) -> &[String];

    /// Whether collectives of NCCL are compared before they start.
    fn is_checked(&self) -> bool;

    /// Sends `bytes` to all ranks and returns what each rank sent. `call` is what this rank calls,
    /// the same on all ranks.
    ///
    /// # Errors
    ///
    /// Also [`WorldError::CallsDiffer`]; those of `cancelled`, after which the other ranks wait
    /// until this one comes again.
    fn all_gather(
        &self,
        call: &str,
        bytes: &[u8],
        cancelled: Cancelled<'_>,
    ) -> Result<Vec<Vec<u8>>>;

    /// The subset with the ranks `members`, in that order, which includes this rank. No bytes are
    /// exchanged.
    fn subset(&self, members: &[usize]) -> Result<Arc<dyn Peers>>;
}

/// The contribution to an exchange: what the rank calls, and its bytes.
pub(crate) fn contribution(call: &str, bytes: &[u8]) -> Vec<u8> {
    [&(call.len() as u32).to_le_bytes(), call.as_bytes(), bytes].concat()
}

/// What a rank calls, and its bytes.
fn split(contribution: &[u8]) -> Option<(String, &[u8])> {
    let (length, rest) = contribution.split_first_chunk()?;
    let (call, bytes) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    Some((String::from_utf8_lossy(call).into_owned(), bytes))
}

/// What the rank calls that has made this [contribution].
pub(crate) fn call_of(contribution: &[u8]) -> Option<String> {
    split(contribution).map(|(call, _)| call)
}

/// The bytes of all [contributions](contribution).
///
/// # Errors
///
/// [`WorldError::CallsDiffer`].
pub(crate) fn same_call(all: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
    let parts = all.iter().map(|contribution| split(contribution)).collect::<Option<Vec<_>>>();
    let parts = parts.ok_or_else(|| Error::invalid("an exchange without the ranks' calls"))?;
    let (calls, bytes): (Vec<String>, Vec<Vec<u8>>) =
        parts.into_iter().map(|(call, bytes)| (call, bytes.to_vec())).unzip();
    match calls.iter().all(|call| *call == calls[0]) {
        true => Ok(bytes),
        false => Err(WorldError::CallsDiffer { calls }.into()),
    }
}

/// Sends `values` to all ranks and returns what each rank sent; lengths may differ.
pub(crate) fn all_gather<T: Pod>(
    peers: &dyn Peers,
    call: &str,
    values: &[T],
    cancelled: Cancelled<'_>,
) -> Result<Vec<Vec<T>>> {
    let all = peers.all_gather(call, bytemuck::cast_slice(values), cancelled)?;
    all.iter().enumerate().map(|(rank, bytes)| read(rank, bytes)).collect()
}

/// Decodes the bytes that `rank` sent.
pub(crate) fn read<T: Pod>(rank: usize, bytes: &[u8]) -> Result<Vec<T>> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    if bytes.len().checked_rem(size_of::<T>()) != Some(0) {
        return Err(Error::invalid(format!(
            "rank {rank} sent {} bytes, which is not a multiple of {} bytes; all ranks use the \
             same type",
            bytes.len(),
            size_of::<T>()
        )));
    }
    Ok(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_wherever_they_lie() {
        let mut bytes = vec![0];
        bytes.extend(bytemuck::bytes_of(&[1.5_f64, -2.0]));
        assert_eq!(read::<f64>(0, &bytes[1..]).unwrap(), [1.5, -2.0]);
        assert_eq!(read::<[u32; 2]>(0, &[]).unwrap(), [[0; 2]; 0]);
    }

    #[test]
    fn contributions_to_one_call_are_taken_apart_and_others_are_named() {
        let all = [contribution("barrier", &[]), contribution("barrier", &[1, 2])];
        assert_eq!(same_call(&all).unwrap(), [vec![], vec![1, 2]]);
        let all = ["barrier", "split", "barrier"].map(|call| contribution(call, &[]));
        let error = same_call(&all).unwrap_err().to_string();
        assert!(error.contains("ranks 0, 2 call barrier; rank 1 calls split"), "{error}");
        for garbage in [&[][..], &[9, 0, 0], &[9, 0, 0, 0, b'x']] {
            assert!(same_call(&[garbage.to_vec()]).is_err(), "{garbage:?}");
        }
    }

    #[test]
    fn bytes_of_another_type_are_refused_with_the_rank() {
        let error = read::<u32>(3, &[0; 6]).unwrap_err().to_string();
        assert!(error.contains("rank 3 sent 6 bytes") && error.contains("4 bytes"), "{error}");
        assert!(read::<()>(0, &[0]).is_err());
    }
}
