//! Reduction operators.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};

use devcomm_sys::nccl::{RawComm, SUCCESS};
use devcomm_types::DataType;

use super::call::{CallProgress, NcclError, NcclResult, call};
use super::collective::{at, check, data_type};
use super::comm::RankComm;
use crate::machine::core::Core;
use crate::machine::driver;

/// A reduction operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Operator {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
    /// Multiplies each rank's elements by its scalar, then sums them.
    PreMulSum(Scalar),
}

/// A scalar of the operator's data type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scalar {
    Host([u8; 8]),
    /// Address in device memory, read when the operation runs.
    Device(usize),
}

/// User-defined operators of a communicator; index 0 has number [`FIRST_USER`].
pub(super) type Operators = RefCell<Vec<Option<(DataType, Scalar)>>>;

/// NCCL: `ncclNumOps`.
const FIRST_USER: c_int = 5;

/// Returns the index in [`Operators`] of the operator with a number, unless it is too small.
fn user_index(number: c_int) -> Option<usize> {
    usize::try_from(number.checked_sub(FIRST_USER)?).ok()
}

impl Operator {
    /// Returns the operator with an `ncclRedOp_t` number, for elements of type `ty`.
    pub(super) fn of(rank_comm: &RankComm, number: c_int, ty: DataType) -> NcclResult<Self> {
        Ok(match number {
            0 => Self::Sum,
            1 => Self::Prod,
            2 => Self::Max,
            3 => Self::Min,
            4 => Self::Avg,
            _ => {
                let index = user_index(number);
                let operators = rank_comm.operators.borrow();
                let found = index.and_then(|index| *operators.get(index)?);
                let (data_type, scalar) = found.ok_or_else(|| {
                    NcclError::argument(format!("no operator has number {number}"))
                })?;
                if data_type != ty {
                    let text = format!("an operator on {data_type:?} for {ty:?}");
                    return Err(NcclError::argument(text));
                }
                Self::PreMulSum(scalar)
            }
        })
    }

    /// Returns the current bytes of the operator's scalar, or zeros.
    pub(super) fn scalar(
        self,
        core: &Core,
        gpu: usize,
        ty: DataType,
    ) -> Result<[u8; 8], driver::CudaError> {
        let mut bytes = [0; 8];
        match self {
            Self::PreMulSum(Scalar::Host(scalar)) => bytes = scalar,
            Self::PreMulSum(Scalar::Device(address)) => {
                check(core, gpu, address, ty.size())?;
                // SAFETY: `address` was checked, no kernel runs now, and `ty` has at most 8 bytes.
                unsafe { bytes.as_mut_ptr().copy_from(at(address), ty.size()) };
            }
            _ => {}
        }
        Ok(bytes)
    }

    /// Returns whether both are the same operator; scalars may differ.
    pub(super) fn same_kind(self, other: Self) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

pub(super) unsafe extern "C" fn create_pre_mul_sum(
    op: *mut c_int,
    scalar: *mut c_void,
    ty: c_int,
    residence: c_int,
    comm: RawComm,
) -> c_int {
    call("ncclRedOpCreatePreMulSum", comm, |cx| {
        cx.note(|| format!("type {ty} residence {residence}"));
        let (rank_comm, ty) = (cx.live(comm)?, data_type(ty)?);
        // `ncclScalarResidence_t`: 0 is memory of the device, 1 is memory of the host.
        let scalar = match residence {
            0 => {
                cx.check_access(&rank_comm, scalar.addr(), ty.size())?;
                Scalar::Device(scalar.expose_provenance())
            }
            1 => {
                let mut bytes = [0; 8];
                // SAFETY: the program passes the address of a scalar, of at most 8 bytes.
                unsafe { bytes.as_mut_ptr().copy_from(scalar.cast(), ty.size()) };
                Scalar::Host(bytes)
            }
            _ => return Err(NcclError::argument(format!("residence {residence} of a scalar"))),
        };
        let mut operators = rank_comm.operators.borrow_mut();
        let index = operators.iter().position(Option::is_none).unwrap_or(operators.len());
        if index == operators.len() {
            operators.push(None);
        }
        operators[index] = Some((ty, scalar));
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        unsafe { op.write(FIRST_USER + index as c_int) };
        Ok(CallProgress::Done(SUCCESS))
    })
}

/// Destroys an operator. Launched operations keep their copy of it.
pub(super) unsafe extern "C" fn destroy(op: c_int, comm: RawComm) -> c_int {
    call("ncclRedOpDestroy", comm, |cx| {
        cx.note(|| op.to_string());
        let rank_comm = cx.rank_comm(comm)?;
        let index = user_index(op);
        let mut operators = rank_comm.operators.borrow_mut();
        match index.and_then(|index| operators.get_mut(index)?.take()) {
            Some(_) => Ok(CallProgress::Done(SUCCESS)),
            None => Err(NcclError::argument(format!("no operator has number {op}"))),
        }
    })
}
