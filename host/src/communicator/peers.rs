//! Exchange of bytes between the ranks of a communicator on the host, without NCCL.
//!
//! With its bytes each rank sends the [terms](Terms) of its call: the call's name, its options, and
//! whether the rank has failed. If a rank has failed, or these differ, the exchange fails on all
//! ranks with the same error. In *checked* worlds each collective of NCCL is preceded by an
//! exchange of a name alone, which contains its count, type, operator and root.

use std::sync::Arc;

use bytemuck::Pod;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, WorldError};

/// The bytes that each rank sent, in rank order.
pub(crate) type Gathered = Arc<Vec<Vec<u8>>>;

/// Fails when a rank is not to wait for an exchange any longer.
pub(crate) type Cancelled<'a> = &'a dyn Fn() -> Result<()>;

/// The condition of exchanges that end only with the other ranks.
pub(crate) const NEVER: Cancelled<'static> = &|| Ok(());

/// A rank's description of its call in an exchange.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms<'a> {
    /// The name of the call, the same on all ranks.
    pub(crate) call: &'a str,
    /// Names and values of its options, the same on all ranks.
    pub(crate) options: &'a [(String, String)],
    /// Why this rank cannot do the call, if it cannot.
    pub(crate) failure: Option<&'a Error>,
}

impl<'a> From<&'a str> for Terms<'a> {
    fn from(call: &'a str) -> Self {
        Self { call, ..Self::default() }
    }
}

/// A set of ranks that exchange bytes, including this rank. All of them must make the same calls in
/// the same order.
pub(crate) trait Peers: Send + Sync {
    /// Returns the hosts of all ranks.
    fn hosts(&self) -> &[String];

    /// Returns whether collectives of NCCL are compared before they start.
    fn is_checked(&self) -> bool;

    /// Sends `bytes` to all ranks and returns what each rank sent.
    ///
    /// # Errors
    ///
    /// The same on all ranks: [`WorldError::CallFailed`], [`WorldError::CallsDiffer`],
    /// [`WorldError::OptionsDiffer`]. Also those of `cancelled`, after which the other ranks wait
    /// until this one makes its next exchange.
    fn all_gather(
        &self,
        terms: Terms<'_>,
        bytes: &[u8],
        cancelled: Cancelled<'_>,
    ) -> Result<Vec<Vec<u8>>>;

    /// Returns the subset with the ranks `members`, in that order, which includes this rank. No
    /// bytes are exchanged.
    fn subset(&self, members: &[usize]) -> Result<Arc<dyn Peers>>;
}

/// The options and the failure of [`Terms`], as sent.
#[derive(Default, Serialize, Deserialize)]
struct Sent {
    options: Vec<(String, String)>,
    /// The text, and whether the error is of the machine.
    failure: Option<(String, bool)>,
}

/// The most bytes of a failure's text that are sent.
const MOST_TEXT: usize = 4096;

/// Returns the contribution to an exchange: what the rank says of its call, and its bytes. Before
/// them are the lengths of the call's name and of [`Sent`] in JSON, 32 bits each, little-endian.
pub(crate) fn contribution<'a>(terms: impl Into<Terms<'a>>, bytes: &[u8]) -> Vec<u8> {
    let Terms { call, options, failure } = terms.into();
    let sent = if options.is_empty() && failure.is_none() {
        Vec::new()
    } else {
        let failure = failure.map(|error| {
            let mut text = error.to_string();
            text.truncate(text.floor_char_boundary(MOST_TEXT));
            (text, error.is_hardware())
        });
        // Strings and a bool always have a JSON form.
        serde_json::to_vec(&Sent { options: options.to_vec(), failure }).unwrap_or_default()
    };
    // The casts lose nothing: names and options are short.
    let lengths = [call.len(), sent.len()].map(|length| (length as u32).to_le_bytes());
    [lengths.as_flattened(), call.as_bytes(), &sent, bytes].concat()
}

/// Returns the call of a contribution, its options and failure, and its bytes.
fn split(contribution: &[u8]) -> Option<(String, &[u8], &[u8])> {
    let (lengths, rest) = contribution.split_first_chunk::<8>()?;
    let length = |at: usize| {
        let length = [0, 1, 2, 3].map(|i| lengths[at + i]);
        u32::from_le_bytes(length) as usize
    };
    let (call, rest) = rest.split_at_checked(length(0))?;
    let (sent, bytes) = rest.split_at_checked(length(4))?;
    Some((String::from_utf8_lossy(call).into_owned(), sent, bytes))
}

/// Returns the call of the rank that made this [contribution].
pub(crate) fn call_of(contribution: &[u8]) -> Option<String> {
    split(contribution).map(|(call, ..)| call)
}

/// Returns the bytes of all [contributions](contribution), if no rank has failed and all ranks have
/// the same terms.
///
/// # Errors
///
/// [`WorldError::CallFailed`], [`WorldError::CallsDiffer`], [`WorldError::OptionsDiffer`].
pub(crate) fn same_call(all: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
    let malformed = || Error::invalid("an exchange without the ranks' calls");
    let (mut calls, mut options, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut failure, mut failures) = (None, 0);
    for (rank, contribution) in all.iter().enumerate() {
        let (call, sent, own) = split(contribution).ok_or_else(malformed)?;
        let sent = match sent {
            [] => Sent::default(),
            sent => serde_json::from_slice(sent).map_err(|_| malformed())?,
        };
        if let Some(why) = sent.failure {
            failures += 1;
            failure.get_or_insert_with(|| (rank, call.clone(), why));
        }
        calls.push(call);
        options.push(sent.options);
        bytes.push(own.to_vec());
    }
    if let Some((rank, call, (why, is_hardware))) = failure {
        let others = failures - 1;
        return Err(WorldError::CallFailed { call, rank, others, why, is_hardware }.into());
    }
    if calls.iter().any(|call| *call != calls[0]) {
        return Err(WorldError::CallsDiffer { calls }.into());
    }
    match options.iter().position(|own| *own != options[0]) {
        None => Ok(bytes),
        Some(rank) => Err(differ(calls.swap_remove(0), &options[0], (rank, &options[rank]))),
    }
}

/// Returns the error of options that differ between rank 0 and another one.
fn differ(call: String, first: &[(String, String)], other: (usize, &[(String, String)])) -> Error {
    let value = |options: &[(String, String)], name: &str| {
        let found = options.iter().find(|option| option.0 == name);
        found.map_or_else(|| "nothing".to_owned(), |option| option.1.clone())
    };
    let (rank, others) = other;
    let mut names = first.iter().chain(others).map(|option| &option.0);
    let named = |name: &String| (name.clone(), value(first, name), value(others, name));
    let differs = names.find(|name| value(first, name) != value(others, name)).map(named);
    let (option, of_first, of_rank) = differs.unwrap_or_else(|| {
        ("the order of its options".to_owned(), "one".to_owned(), "another".to_owned())
    });
    let (first, second) = ((0, of_first), (rank, of_rank));
    WorldError::OptionsDiffer { call, option, first, second }.into()
}

/// Sends `values` to all ranks and returns what each rank sent; lengths may differ.
pub(crate) fn all_gather<'a, T: Pod>(
    peers: &dyn Peers,
    terms: impl Into<Terms<'a>>,
    values: &[T],
    cancelled: Cancelled<'_>,
) -> Result<Vec<Vec<T>>> {
    let all = peers.all_gather(terms.into(), bytemuck::cast_slice(values), cancelled)?;
    all.iter().enumerate().map(|(rank, bytes)| read(rank, bytes)).collect()
}

/// Decodes the bytes that `rank` sent.
pub(crate) fn read<T: Pod>(rank: usize, bytes: &[u8]) -> Result<Vec<T>> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    // `None` if a `T` has no bytes.
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
        let json = [0, 0, 0, 0, 1, 0, 0, 0, b'x'];
        for garbage in [&[][..], &[9, 0, 0], &[9, 0, 0, 0, 0, 0, 0, 0, b'x'], &json] {
            assert!(same_call(&[garbage.to_vec()]).is_err(), "{garbage:?}");
        }
    }

    fn options(values: &[(&str, u32)]) -> Vec<(String, String)> {
        values.iter().map(|(name, value)| ((*name).to_owned(), value.to_string())).collect()
    }

    #[test]
    fn options_that_differ_are_named_with_both_ranks() {
        let said = |all: &[&[(&str, u32)]]| {
            let all = all.iter().map(|values| {
                contribution(Terms { options: &options(values), ..Terms::from("new") }, &[])
            });
            same_call(&all.collect::<Vec<_>>()).map_err(|error| error.to_string())
        };
        let same = &[("a", 1), ("b", 2)][..];
        assert_eq!(said(&[same, same]).unwrap(), vec![Vec::<u8>::new(); 2]);
        let told = said(&[same, same, &[("a", 1), ("b", 3)]]).unwrap_err();
        assert!(told.starts_with("new: b is 2 on rank 0 and 3 on rank 2"), "{told}");
        let told = said(&[&same[..1], same]).unwrap_err();
        assert!(told.starts_with("new: b is nothing on rank 0 and 2 on rank 1"), "{told}");
        let told = said(&[same, &[("b", 2), ("a", 1)]]).unwrap_err();
        assert!(told.contains("the order of its options"), "{told}");
    }

    #[test]
    fn a_rank_that_failed_is_named_with_its_text_whatever_the_others_call() {
        fn failed(error: &Error) -> Terms<'_> {
            Terms { failure: Some(error), ..Terms::from("new") }
        }
        let long = Error::invalid("ä".repeat(MOST_TEXT));
        let all = [
            contribution("barrier", &[]),
            contribution(failed(&Error::invalid("out of memory")), &[]),
            contribution(failed(&long), &[]),
        ];
        let told = same_call(&all).unwrap_err().to_string();
        assert_eq!(told, "rank 1 (and 1 other) failed in new: out of memory");
        let told = same_call(&[contribution(failed(&long), &[])]).unwrap_err().to_string();
        assert!(told.len() < MOST_TEXT + 40, "{told}");
    }

    #[test]
    fn bytes_of_another_type_are_refused_with_the_rank() {
        let error = read::<u32>(3, &[0; 6]).unwrap_err().to_string();
        assert!(error.contains("rank 3 sent 6 bytes") && error.contains("4 bytes"), "{error}");
        assert!(read::<()>(0, &[0]).is_err());
    }
}
