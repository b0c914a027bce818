//! What the ranks of an operation agree on: values, and the plans that all can do.

use std::hash::{DefaultHasher, Hash, Hasher};

use devcomm_host::NcclError;

use crate::prelude::*;

/// Returns a hash. It is the same in all ranks, which run one program: the hasher has fixed keys.
pub(crate) fn hash(value: impl Hash) -> u64 {
    let mut hash = DefaultHasher::new();
    value.hash(&mut hash);
    hash.finish()
}

/// Returns the text of an option's value, which ranks compare.
pub(crate) fn or_default(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "the default".to_owned(), |value| value.to_string())
}

/// Returns for each plan whether all ranks can do it, given which this rank can do. *Collective*.
pub(crate) fn all_can(
    comm: &Communicator,
    call: &str,
    own: Result<Vec<bool>>,
) -> Result<Vec<bool>> {
    let own = own.map(|can| (can.clone(), can.into_iter().map(u8::from).collect::<Vec<_>>()));
    // A rank with an error has no length, but all ranks get the error before lengths are compared.
    let len = own.as_ref().map_or(0, |(can, _)| can.len());
    let (mut can, all) = comm.collective(call).option("plans", len).exchange(own)?;
    for others in &all {
        can.iter_mut().zip(others).for_each(|(can, other)| *can &= *other == 1);
    }
    Ok(can)
}

/// Returns whether all ranks reach each other by load and store; `false` if NCCL cannot tell.
pub(crate) fn is_single_lsa_team(comm: &Communicator) -> Result<bool> {
    match comm.require_single_lsa_team() {
        Ok(()) => Ok(true),
        Err(
            Error::DevComm(DevCommError::SeveralLsaTeams { .. })
            | Error::Nccl(NcclError::Unsupported { .. }),
        ) => Ok(false),
        Err(error) => Err(error),
    }
}
