//! What the ranks of an operation find out of each other. All functions are *collective*.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::slice;

use devcomm_host::{Communicator, Result};

use crate::Gemm;
use crate::check::refuse;

/// What every rank has of its own, in the order of the ranks, or the error of one of them: its own
/// here, and in the others that it cannot take part.
pub(crate) fn agree_on<T>(
    comm: &Communicator,
    mine: Result<(T, [u32; 2])>,
) -> Result<(T, Vec<[u32; 2]>)> {
    let sent = mine.as_ref().map_or(&[][..], |(_, number)| slice::from_ref(number));
    let all = comm.host_all_gather(sent)?;
    let (own, _) = mine?;
    let known = |(rank, number): (usize, &Vec<[u32; 2]>)| match number[..] {
        [number] => Ok(number),
        _ => cannot_take_part(rank),
    };
    Ok((own, all.iter().enumerate().map(known).collect::<Result<_>>()?))
}

/// As [`agree_on`]; whether all ranks have the same.
pub(crate) fn is_same<T>(comm: &Communicator, mine: Result<(T, impl Hash)>) -> Result<(T, bool)> {
    let mine = mine.map(|(own, same)| {
        let mut hash = DefaultHasher::new();
        same.hash(&mut hash);
        (own, [hash.finish() as u32, (hash.finish() >> 32) as u32])
    });
    let (own, all) = agree_on(comm, mine)?;
    Ok((own, all.iter().all(|hash| *hash == all[0])))
}

/// As [`agree_on`], for what must be the same in all ranks.
pub(crate) fn agree_on_same<T>(
    comm: &Communicator,
    mine: Result<(T, impl Hash)>,
    what: &str,
) -> Result<T> {
    match is_same(comm, mine)? {
        (own, true) => Ok(own),
        (_, false) => refuse(format!("the ranks have different {what}")),
    }
}

/// For each of a list of the same length in all ranks, whether it is so in all of them, or an
/// error as of [`agree_on`].
pub(crate) fn all_can(comm: &Communicator, mine: Result<Vec<bool>>) -> Result<Vec<bool>> {
    let sent = mine.as_ref().map_or(Vec::new(), |can| can.iter().copied().map(u8::from).collect());
    let all = comm.host_all_gather(&sent)?;
    let mut can = mine?;
    for (rank, others) in all.iter().enumerate() {
        if others.len() != can.len() {
            return cannot_take_part(rank);
        }
        can.iter_mut().zip(others).for_each(|(can, other)| *can &= *other == 1);
    }
    Ok(can)
}

/// Whether several ranks in one LSA team all have kernels for Hopper.
pub(crate) fn are_hoppers(comm: &Communicator, gemm: &Gemm) -> Result<bool> {
    let ((), all) = agree_on(comm, Ok(((), [u32::from(gemm.is_hopper()), 0])))?;
    let are_hoppers = all.len() > 1 && all.iter().all(|[is_hopper, _]| *is_hopper == 1);
    Ok(are_hoppers && comm.require_single_lsa_team().is_ok())
}

pub(crate) fn cannot_take_part<T>(rank: usize) -> Result<T> {
    refuse(format!("rank {rank} cannot take part: its own error says why"))
}
