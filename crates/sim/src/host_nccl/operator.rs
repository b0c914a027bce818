//! Reduction operators.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};

use devcomm_sys::nccl::{RawComm, SUCCESS};
use devcomm_types::DataType;

use super::call::{CallProgress, NcclError, NcclResult, call};
use super::collective::{at, check, data_type};
use super::comm::RankComm;
use crate::driver;
use crate::machine::core::Core;

/// A reduction operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Operator {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
    /// Sum of elements multiplied by a scalar, which may differ by rank.
    PreMulSum(Scalar),
}

/// A scalar of the operator's type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scalar {
    Host([u8; 8]),
    /// Read when the operation runs.
    Device(usize),
}

/// User-defined operators of a communicator; index 0 is number [`FIRST`].
pub(super) type Operators = RefCell<Vec<Option<(DataType, Scalar)>>>;

/// NCCL: `ncclNumOps`.
const FIRST: c_int = 5;

impl Operator {
    /// The operator of a number, for elements of a type.
    pub(super) fn of(rank_comm: &RankComm, number: c_int, on: DataType) -> NcclResult<Self> {
        Ok(match number {
            0 => Self::Sum,
            1 => Self::Prod,
            2 => Self::Max,
            3 => Self::Min,
            4 => Self::Avg,
            _ => {
                let index = usize::try_from(number - FIRST).ok();
                let operators = rank_comm.operators.borrow();
                let found = index.and_then(|index| *operators.get(index)?);
                let (data_type, scalar) = found.ok_or_else(|| {
                    NcclError::argument(format!("no operator has number {number}"))
                })?;
                if data_type != on {
                    let text = format!("an operator on {data_type:?} for {on:?}");
                    return Err(NcclError::argument(text));
                }
                Self::PreMulSum(scalar)
            }
        })
    }

    /// The current bytes of its scalar.
    pub(super) fn scalar(
        self,
        core: &Core,
        gpu: usize,
        on: DataType,
    ) -> Result<[u8; 8], driver::CudaError> {
        let mut bytes = [0; 8];
        match self {
            Self::PreMulSum(Scalar::Host(scalar)) => bytes = scalar,
            Self::PreMulSum(Scalar::Device(address)) => {
                check(core, gpu, address, on.size())?;
                // SAFETY: it was checked, no kernel runs meanwhile, and it has at most 8 bytes.
                unsafe { bytes.as_mut_ptr().copy_from(at(address), on.size()) };
            }
            _ => {}
        }
        Ok(bytes)
    }

    /// Whether both are the same operator; scalars may differ.
    pub(super) fn same_kind(self, other: Self) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

pub(super) unsafe extern "C" fn create_pre_mul_sum(
    op: *mut c_int,
    scalar: *mut c_void,
    on: c_int,
    residence: c_int,
    comm: RawComm,
) -> c_int {
    call("ncclRedOpCreatePreMulSum", comm, |cx| {
        cx.note(|| format!("type {on} residence {residence}"));
        let (rank_comm, on) = (cx.live(comm)?, data_type(on)?);
        let scalar = match residence {
            0 => {
                cx.reached(&rank_comm, scalar.addr(), on.size())?;
                Scalar::Device(scalar.expose_provenance())
            }
            1 => {
                let mut bytes = [0; 8];
                // SAFETY: the module's; a scalar has at most 8 bytes.
                unsafe { bytes.as_mut_ptr().copy_from(scalar.cast(), on.size()) };
                Scalar::Host(bytes)
            }
            _ => return Err(NcclError::argument(format!("residence {residence} of a scalar"))),
        };
        let mut operators = rank_comm.operators.borrow_mut();
        let index = operators.iter().position(Option::is_none).unwrap_or(operators.len());
        if index == operators.len() {
            operators.push(None);
        }
        operators[index] = Some((on, scalar));
        // SAFETY: the module's.
        unsafe { op.write(FIRST + index as c_int) };
        Ok(CallProgress::Done(SUCCESS))
    })
}

/// Destroys an operator. Launched operations have copied its scalar.
pub(super) unsafe extern "C" fn destroy(op: c_int, comm: RawComm) -> c_int {
    call("ncclRedOpDestroy", comm, |cx| {
        cx.note(|| op.to_string());
        let rank_comm = cx.rank_comm(comm)?;
        let index = usize::try_from(op - FIRST).ok();
        let mut operators = rank_comm.operators.borrow_mut();
        match index.and_then(|index| operators.get_mut(index)?.take()) {
            Some(_) => Ok(CallProgress::Done(SUCCESS)),
            None => Err(NcclError::argument(format!("no operator has number {op}"))),
        }
    })
}
