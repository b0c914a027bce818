//! Exchange of bytes between the ranks of a communicator on the host, without NCCL.

use std::rc::Rc;
use std::sync::Arc;

use bytemuck::Pod;

use crate::error::{Error, Result};

/// The bytes that each rank sent, in rank order.
pub(crate) type Gathered = Arc<Vec<Vec<u8>>>;

/// A set of ranks that exchange bytes, including this rank. All of them must make the same calls in
/// the same order.
pub(crate) trait Peers {
    /// The hosts of all ranks.
    fn hosts(&self) -> &[String];

    /// Sends `bytes` to all ranks and returns what each rank sent.
    fn all_gather(&self, bytes: &[u8]) -> Result<Gathered>;

    /// The subset with the ranks `members`, in that order, which includes this rank. No bytes are
    /// exchanged.
    fn subset(&self, members: &[usize]) -> Result<Rc<dyn Peers>>;
}

/// Sends `values` to all ranks and returns what each rank sent; lengths may differ.
pub(crate) fn all_gather<T: Pod>(peers: &dyn Peers, values: &[T]) -> Result<Vec<Vec<T>>> {
    let all = peers.all_gather(bytemuck::cast_slice(values))?;
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
    fn bytes_of_another_type_are_refused_with_the_rank() {
        let error = read::<u32>(3, &[0; 6]).unwrap_err().to_string();
        assert!(error.contains("rank 3 sent 6 bytes") && error.contains("4 bytes"), "{error}");
        assert!(read::<()>(0, &[0]).is_err());
    }
}
