//! Reduction operators: NCCL's own, and sums of scaled elements.

use std::ffi::c_int;
use std::sync::Arc;

use devcomm_types::{DataType, Element, F8E4M3, F8E5M2};
use half::{bf16, f16};

use super::Communicator;
use crate::device::in_group::refuse_inside;
use crate::device::issuer::Resource;
use crate::device::{Buffer, Dynamic, KeepAlive, Lifecycle};
use crate::error::{Error, Result, StateError};
use crate::sys::nccl::call::Out;
use crate::sys::nccl::calls::{self, Scalar};

/// How a reduction combines elements. NCCL: `ncclRedOp_t`.
///
/// All ranks get the same bits when floats are reduced:
///
/// * A sum, product or average with a NaN is NaN, and so are the sum of infinities of both signs
///   and the product of an infinity and a zero. Sign and payload of a NaN are not determined.
/// * `Max` and `Min` leave NaNs out: the result is NaN only if all ranks' elements are.
/// * A zero may have either sign, also where all ranks' zeros have the same one.
/// * A result of 8-bit floats beyond the largest number is that number, of its sign.
///
/// Sums of integers wrap around.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclRedOp_t")]
pub enum ReduceOp {
    /// The sum.
    Sum = 0,
    /// The product.
    Prod = 1,
    /// The maximum.
    Max = 2,
    /// The minimum.
    Min = 3,
    /// The sum divided by the number of ranks. NCCL multiplies floats by the reciprocal instead,
    /// rounded to their type and, but for some kernels, before it adds them: for 8-bit floats of
    /// three ranks that is 0.34375.
    Avg = 4,
}

impl ReduceOp {
    /// All operators; the index is the number.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Prod, Self::Max, Self::Min, Self::Avg];

    /// Returns the operator of this name: one of NCCL's (`ncclProd`), with or without `nccl`; of
    /// torch's (`ReduceOp.PRODUCT`), with or without `ReduceOp.` and what precedes it; or in small
    /// letters.
    ///
    /// Torch's `PREMUL_SUM` has a factor: it is [`Communicator::pre_mul_sum`]. `BAND`, `BOR` and
    /// `BXOR` are not NCCL's.
    ///
    /// ```
    /// use devcomm_host::ReduceOp;
    ///
    /// for name in ["ReduceOp.PRODUCT", "RedOpType.PRODUCT", "ncclProd", "prod"] {
    ///     assert_eq!(ReduceOp::from_name(name), Some(ReduceOp::Prod));
    /// }
    /// assert_eq!(ReduceOp::from_name("BXOR"), None);
    /// ```
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.rsplit_once('.').map_or(name, |(_, name)| name);
        let name = name.strip_prefix("nccl").unwrap_or(name).to_ascii_lowercase();
        Some(match name.as_str() {
            "sum" => Self::Sum,
            "prod" | "product" => Self::Prod,
            "max" => Self::Max,
            "min" => Self::Min,
            "avg" => Self::Avg,
            _ => return None,
        })
    }
}

/// An operator for reductions of `E`: a [`ReduceOp`], or a [`CustomReduceOp`] of that type.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an operator for reductions of `{E}`",
    label = "expected a `ReduceOp`, or a `&CustomReduceOp<{E}>`"
)]
pub trait ReduceOperator<E>: sealed::Operator {
    /// Returns what the operator does, for reductions without NCCL: the operator that combines the
    /// elements, and the factor by which this rank's elements are multiplied first.
    ///
    /// # Errors
    ///
    /// [`StateError::Closed`]; [`Error::InvalidInput`] for an operator of another communicator.
    fn parts(&self, communicator: &Communicator) -> Result<(ReduceOp, ReduceScale<E>)>;
}

/// What a rank's elements are multiplied by before a reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReduceScale<E> {
    /// One: the elements are not multiplied.
    One,
    /// This value.
    Value(E),
    /// A value in device memory, or of a type that the program does not know.
    Unknown,
}

pub(crate) mod sealed {
    use super::{Arc, Communicator, DataType, Resource, Result, c_int};

    /// What must be open when the operator is used.
    pub struct Opened(pub(crate) Arc<dyn Resource>);

    pub trait Operator {
        /// Returns NCCL's value of the operator, and what it is made of.
        fn resolve(
            &self,
            communicator: &Communicator,
            data_type: DataType,
        ) -> Result<(c_int, Option<Opened>)>;

        /// Returns what must be equal on all ranks: the values of custom operators may differ.
        fn name(&self) -> String;
    }
}

impl<E> ReduceOperator<E> for ReduceOp {
    fn parts(&self, _: &Communicator) -> Result<(ReduceOp, ReduceScale<E>)> {
        Ok((*self, ReduceScale::One))
    }
}

impl sealed::Operator for ReduceOp {
    fn resolve(&self, _: &Communicator, _: DataType) -> Result<(c_int, Option<sealed::Opened>)> {
        Ok((*self as c_int, None))
    }

    fn name(&self) -> String {
        format!("{self:?}")
    }
}

/// The sum of every rank's elements multiplied by that rank's scalar.
///
/// Created by [`Communicator::pre_mul_sum`] and [`Communicator::pre_mul_sum_from`], valid for
/// reductions of `T` on that communicator. It is closed with the communicator, or when
/// dropped.
///
/// NCCL: `ncclRedOpCreatePreMulSum`, `ncclRedOpDestroy`.
#[doc(alias = "ncclRedOpCreatePreMulSum")]
#[doc(alias = "ncclRedOpDestroy")]
#[must_use = "dropping it closes it"]
pub struct CustomReduceOp<T> {
    inner: Arc<Inner>,
    /// The scalar, unless it is in device memory.
    scalar: Option<T>,
}

struct Inner {
    op: c_int,
    data_type: DataType,
    life: Lifecycle,
    communicator: Communicator,
    /// Keeps a scalar in device memory alive: every operation reads it.
    _scalar: Option<KeepAlive>,
}

impl Communicator {
    /// Returns an operator that multiplies this rank's elements by `scalar` and sums over the
    /// ranks.
    ///
    /// NCCL: `ncclRedOpCreatePreMulSum` with `ncclScalarHostImmediate`.
    ///
    /// # Errors
    ///
    /// [`StateError::CommunicatorEnded`], [`Error::Nccl`].
    pub fn pre_mul_sum<T: Element>(&self, scalar: T) -> Result<CustomReduceOp<T>> {
        // Words of 64 bits are aligned for every T.
        let mut bytes = vec![0u64; size_of::<T>().div_ceil(8)];
        // SAFETY: `bytes` has room for a T, which is plain data.
        unsafe { bytes.as_mut_ptr().cast::<T>().write_unaligned(scalar) };
        self.custom(Scalar::Host(bytes), Some(scalar), None)
    }

    /// Does the same as [`pre_mul_sum`](Self::pre_mul_sum), with a scalar in device memory: a
    /// buffer of one element, which every operation with the operator reads.
    ///
    /// NCCL: `ncclRedOpCreatePreMulSum` with `ncclScalarDevice`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for another number of elements or memory of another context;
    /// otherwise as [`pre_mul_sum`](Self::pre_mul_sum).
    pub fn pre_mul_sum_from<B>(&self, scalar: &B) -> Result<CustomReduceOp<B::Element>>
    where
        B: Buffer<Element: Element>,
    {
        let slice = scalar.device_slice();
        self.require_own(slice.context(), "a scalar")?;
        if slice.len() != 1 {
            return Err(Error::invalid(format!("a scalar has 1 element, not {}", slice.len())));
        }
        self.custom(Scalar::Device(slice.device_address()), None, slice.keep_alive())
    }

    /// Returns NCCL's number of an operator that averages. For the floats that NCCL's symmetric
    /// kernels reduce, which are all but `f64`, it multiplies by 1/ranks, rounded to the type, and
    /// sums; for other types it is NCCL's own.
    pub(super) fn average(&self, data_type: DataType) -> Result<c_int> {
        let factor = (self.n_ranks() as f32).recip();
        let scalar = match data_type {
            DataType::Float32 => factor.to_bits(),
            DataType::Float16 => f16::from_f32(factor).to_bits().into(),
            DataType::Bfloat16 => bf16::from_f32(factor).to_bits().into(),
            DataType::Float8e4m3 => F8E4M3::from_f32(factor).to_bits().into(),
            DataType::Float8e5m2 => F8E5M2::from_f32(factor).to_bits().into(),
            _ => return Ok(ReduceOp::Avg as c_int),
        };
        let averages = self.handle().averages();
        let known = averages.lock().iter().find(|(of, _)| *of == data_type).map(|(_, op)| *op);
        if let Some(op) = known {
            return Ok(op);
        }
        // Two threads may both create one: either works, and both end with the communicator.
        let op = self.create_operator(Scalar::Host(vec![scalar.into()]), data_type)?;
        averages.lock().push((data_type, op));
        Ok(op)
    }

    /// Returns NCCL's number of a new operator.
    fn create_operator(&self, scalar: Scalar, data_type: DataType) -> Result<c_int> {
        self.bind()?;
        let out = Out::new(0);
        self.call("ncclRedOpCreatePreMulSum", |comm| {
            calls::pre_mul_sum(comm, scalar, data_type as c_int, out.clone())
        })?;
        Ok(out.get())
    }

    fn custom<T: Element>(
        &self,
        scalar: Scalar,
        value: Option<T>,
        keep: Option<KeepAlive>,
    ) -> Result<CustomReduceOp<T>> {
        let inner = Arc::new(Inner {
            op: self.create_operator(scalar, T::DATA_TYPE)?,
            data_type: T::DATA_TYPE,
            life: Lifecycle::default(),
            communicator: self.clone(),
            _scalar: keep,
        });
        self.adopt(&inner);
        Ok(CustomReduceOp { inner, scalar: value })
    }
}

impl<T> CustomReduceOp<T> {
    /// Returns NCCL's number of the operator (`ncclRedOp_t`), for use with other libraries.
    ///
    /// # Errors
    ///
    /// [`StateError::Closed`].
    pub fn as_raw(&self) -> Result<i32> {
        let rank = self.inner.communicator.rank();
        let closed = || StateError::Closed { what: "the operator", rank };
        if self.is_valid() { Ok(self.inner.op) } else { Err(closed().into()) }
    }

    /// Returns whether it can still be used.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.inner.is_open() && self.inner.communicator.is_valid()
    }

    /// Releases the operator. Operations that were enqueued with it are not affected. Idempotent.
    ///
    /// NCCL: `ncclRedOpDestroy`.
    ///
    /// # Errors
    ///
    /// [`StateError::InGroup`], since the group's operations may use it; [`Error::Nccl`].
    pub fn close(&self) -> Result<()> {
        refuse_inside("the end of an operator")?;
        self.inner.close()
    }
}

impl<T: Element> ReduceOperator<T> for &CustomReduceOp<T> {
    fn parts(&self, communicator: &Communicator) -> Result<(ReduceOp, ReduceScale<T>)> {
        self.require_usable(communicator)?;
        Ok((ReduceOp::Sum, self.scalar.map_or(ReduceScale::Unknown, ReduceScale::Value)))
    }
}

/// The element types are compared at run time.
impl<T: Element> ReduceOperator<Dynamic> for &CustomReduceOp<T> {
    fn parts(&self, communicator: &Communicator) -> Result<(ReduceOp, ReduceScale<Dynamic>)> {
        self.require_usable(communicator)?;
        Ok((ReduceOp::Sum, ReduceScale::Unknown))
    }
}

impl<T> CustomReduceOp<T> {
    fn require_usable(&self, communicator: &Communicator) -> Result<()> {
        if !self.is_valid() {
            return Err(
                StateError::Closed { what: "the operator", rank: communicator.rank() }.into()
            );
        }
        if !Arc::ptr_eq(self.inner.communicator.handle(), communicator.handle()) {
            return Err(Error::invalid("the operator belongs to another communicator"));
        }
        Ok(())
    }
}

impl<T> sealed::Operator for &CustomReduceOp<T> {
    fn resolve(
        &self,
        communicator: &Communicator,
        data_type: DataType,
    ) -> Result<(c_int, Option<sealed::Opened>)> {
        self.require_usable(communicator)?;
        let op = self.as_raw()?;
        let own = &self.inner.data_type;
        if *own != data_type {
            return Err(Error::invalid(format!("an operator for {own:?}, not {data_type:?}")));
        }
        Ok((op, Some(sealed::Opened(Arc::clone(&self.inner) as _))))
    }

    fn name(&self) -> String {
        "a custom operator".to_owned()
    }
}

impl Resource for Inner {
    fn name(&self) -> &'static str {
        "the operator"
    }

    fn is_open(&self) -> bool {
        self.life.is_open()
    }

    fn close(&self) -> Result<()> {
        let context = self.communicator.context();
        let Some(ending) = self.life.begin_end(context)? else { return Ok(()) };
        ending.done();
        if !self.communicator.is_valid() {
            return Ok(());
        }
        let op = self.op;
        self.communicator.release(|comm| calls::red_op_destroy(comm, op))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.life.set_unused();
        if let Err(error) = self.close() {
            tracing::warn!("{error}");
        }
    }
}

impl<T> std::fmt::Debug for CustomReduceOp<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CustomReduceOp({}, {:?})", self.inner.op, self.inner.data_type)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operator_has_the_names_of_nccl_and_torch() {
        for (number, op) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, number);
            let (own, torch) = (format!("{op:?}"), format!("{op:?}").to_uppercase());
            let torch = if op == ReduceOp::Prod { "PRODUCT".to_owned() } else { torch };
            for name in [
                format!("nccl{own}"),
                format!("ReduceOp.{torch}"),
                format!("torch.distributed.ReduceOp.{torch}"),
                own.to_lowercase(),
                torch,
                own,
            ] {
                assert_eq!(ReduceOp::from_name(&name), Some(op), "{name}");
            }
        }
        for name in ["", "PREMUL_SUM", "BAND", "BOR", "BXOR", "ncclNumOps", "sum.", "summe"] {
            assert_eq!(ReduceOp::from_name(name), None, "{name}");
        }
    }
}
