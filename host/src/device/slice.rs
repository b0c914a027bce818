//! Slices of device memory, the operands of collectives, copies and fills.

use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use devcomm_types::{DataType, Element, IntoArg, Slice};

use super::context::Context;
use super::enqueues::Enqueue;
use super::in_group::refuse_before_deferred;
use super::issuer::KeepAlive;
use crate::error::{Error, Result};
use crate::sys::cuda::stream::StreamHandle;

/// Elements of a type that is known only when the program runs; see
/// [`DeviceSlice::from_raw_parts_dynamic`].
#[derive(Clone, Copy, Debug)]
pub enum Dynamic {}

/// Consecutive elements in device memory of one GPU. The slice keeps its allocation alive.
///
/// Operations take any [`Buffer`]: a slice, or all of a
/// [`SymmetricBuffer`](crate::SymmetricBuffer), [`Window`](crate::Window) or
/// [`DeviceBuffer`](crate::DeviceBuffer).
pub struct DeviceSlice<T> {
    address: u64,
    len: usize,
    data_type: DataType,
    context: Context,
    owner: Option<KeepAlive>,
    element: PhantomData<T>,
}

/// Device memory that operations work on, with elements of type `Element`.
///
/// Implemented by [`SymmetricBuffer`](crate::SymmetricBuffer), [`Window`](crate::Window),
/// [`DeviceBuffer`](crate::DeviceBuffer) and [`DeviceSlice`].
///
/// # Safety
///
/// The memory stays allocated while the value is borrowed. After the value is dropped, the memory
/// stays allocated until all operations that were enqueued before the drop have ended.
pub unsafe trait Buffer {
    /// The type of the elements, or [`Dynamic`].
    type Element;

    /// Returns all of the memory.
    fn device_slice(&self) -> DeviceSlice<Self::Element>;

    /// Returns the elements of `range`, for example `..n`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a range that is not within the memory.
    fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceSlice<Self::Element>>
    where
        Self: Sized,
    {
        self.device_slice().subslice(range)
    }
}

// SAFETY: the owner of the memory keeps it, or the caller of `from_raw_parts` does.
unsafe impl<T> Buffer for DeviceSlice<T> {
    type Element = T;

    fn device_slice(&self) -> DeviceSlice<T> {
        self.clone()
    }
}

impl<T: Element> DeviceSlice<T> {
    /// Returns memory that another part of the program allocated, `len` elements from `address` on.
    ///
    /// ```no_run
    /// # use devcomm_host::{Communicator, Context, DeviceSlice, ReduceOp, Result, Stream};
    /// # type Tensor = (u64, usize);
    /// # fn f(comm: &Communicator, context: &Context, t: Tensor, stream: &Stream) -> Result<()> {
    /// let (data_ptr, numel) = t;
    /// // SAFETY: the tensor lives until the stream is synchronized.
    /// let tensor = unsafe { DeviceSlice::<f32>::from_raw_parts(context, data_ptr, numel) };
    /// comm.all_reduce(&tensor, &tensor, ReduceOp::Sum, stream)?; // in place
    /// stream.synchronize()
    /// # }
    /// ```
    ///
    /// # Safety
    ///
    /// The memory is of the context's GPU, is aligned for `T`, and stays allocated until all
    /// operations on the slice, in all streams, are done.
    #[must_use]
    pub unsafe fn from_raw_parts(context: &Context, address: u64, len: usize) -> Self {
        // SAFETY: the caller passes memory of `len` elements that outlives the slice.
        unsafe { Self::borrowed(context, address, len, T::DATA_TYPE) }
    }

    pub(crate) fn owned(context: &Context, address: u64, len: usize, owner: KeepAlive) -> Self {
        Self::of_type(context, address, len, T::DATA_TYPE, owner)
    }

    /// Copies `data` to the first `data.len()` elements, after waiting for this rank's streams.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if `data` is longer than the memory; those of waiting for the
    /// streams; the driver's errors.
    pub fn copy_from_host(&self, data: &[T]) -> Result<()> {
        self.require_fit(data.len())?;
        let (stream, _enqueue) = self.idle_default_stream()?;
        // SAFETY: the memory has at least `data.len()` elements. If another thread enqueues work
        // with it, only the values are undefined.
        unsafe { stream.copy_to_device(self.address, bytes_of(data)) }
    }

    /// Copies the first `data.len()` elements to `data`, after waiting for this rank's streams.
    ///
    /// # Errors
    ///
    /// The errors are those of [`copy_from_host`](Self::copy_from_host).
    pub fn copy_to_host(&self, data: &mut [T]) -> Result<()> {
        self.require_fit(data.len())?;
        let (stream, _enqueue) = self.idle_default_stream()?;
        // SAFETY: as in `copy_from_host`; every bit pattern is a valid `Element`.
        unsafe { stream.copy_to_host(bytes_of_mut(data), self.address) }
    }

    /// Sets every byte, after waiting for this rank's streams.
    ///
    /// # Errors
    ///
    /// Those of waiting for the streams; the driver's errors.
    pub fn fill_bytes(&self, byte: u8) -> Result<()> {
        let (stream, _enqueue) = self.idle_default_stream()?;
        // SAFETY: the range is exactly the memory; otherwise as in `copy_from_host`.
        unsafe { stream.fill(self.address, &[byte], self.byte_len())? };
        stream.synchronize()
    }

    /// Sets every byte of memory that no operation uses yet. Unlike
    /// [`fill_bytes`](Self::fill_bytes), this waits for the default stream only: work that other
    /// threads have enqueued may wait for this thread, so a wait for it could deadlock.
    pub(crate) fn fill_new(&self, byte: u8) -> Result<()> {
        let context = &self.context;
        let (event, _enqueue) = (context.event_without_timing()?, context.begin_enqueue()?);
        let stream = context.cuda().default_stream();
        // SAFETY: the range is exactly the memory, whose owner is not dropped before the wait has
        // ended or the GPU has failed.
        unsafe { stream.fill(self.address, &[byte], self.byte_len())? };
        stream.record(event.handle())?;
        context.poll(None, || event.is_reached())
    }

    /// Waits for this rank's streams, and returns the default stream. Streams of this crate do not
    /// wait for the default stream: the caller must wait for the work that it enqueues there.
    fn idle_default_stream(&self) -> Result<(StreamHandle, Enqueue<'_>)> {
        // The operations of an open group are deferred: this copy would run before them.
        refuse_before_deferred(&self.context, None, "a copy or fill of memory")?;
        self.context.synchronize_streams()?;
        let enqueue = self.context.begin_enqueue()?;
        self.context.cuda().bind()?;
        Ok((self.context.cuda().default_stream(), enqueue))
    }

    fn require_fit(&self, count: usize) -> Result<()> {
        if count > self.len {
            let (len, name) = (self.len, T::NAME);
            let text = format!("{count} elements of {name} do not fit in memory of {len}");
            return Err(Error::invalid(text));
        }
        Ok(())
    }

    /// Returns the same memory, with the element type known at run time only.
    #[must_use]
    pub fn into_dynamic(self) -> DeviceSlice<Dynamic> {
        let Self { address, len, data_type, context, owner, .. } = self;
        DeviceSlice { address, len, data_type, context, owner, element: PhantomData }
    }
}

/// Returns the bytes of elements.
pub(super) fn bytes_of<T: Element>(data: &[T]) -> &[u8] {
    // SAFETY: Element promises plain data without padding, so its bytes are initialised.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

/// Returns the bytes of elements, mutable.
pub(super) fn bytes_of_mut<T: Element>(data: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and Element promises that every bit pattern is valid.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), size_of_val(data)) }
}

impl DeviceSlice<Dynamic> {
    /// Returns the same memory as elements of this type, such as `u32` for signed numbers.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if the elements have another size.
    pub fn into_typed<T: Element>(self) -> Result<DeviceSlice<T>> {
        let Self { address, len, data_type, context, owner, .. } = self;
        if data_type.size() != T::DATA_TYPE.size() {
            let wanted = T::DATA_TYPE;
            return Err(Error::invalid(format!("memory of {data_type:?}, expected {wanted:?}")));
        }
        let (data_type, element) = (T::DATA_TYPE, PhantomData);
        Ok(DeviceSlice { address, len, data_type, context, owner, element })
    }

    /// Does the same as [`from_raw_parts`](Self::from_raw_parts), for `len` elements of
    /// `data_type`.
    ///
    /// # Safety
    ///
    /// The contract is that of [`from_raw_parts`](DeviceSlice::from_raw_parts).
    #[must_use]
    pub unsafe fn from_raw_parts_dynamic(
        context: &Context,
        address: u64,
        len: usize,
        data_type: DataType,
    ) -> Self {
        // SAFETY: the caller passes memory of `len` elements that outlives the slice.
        unsafe { Self::borrowed(context, address, len, data_type) }
    }
}

impl<T> DeviceSlice<T> {
    /// # Safety
    ///
    /// The contract is that of [`from_raw_parts`](DeviceSlice::from_raw_parts); the elements are of
    /// `data_type`.
    unsafe fn borrowed(context: &Context, address: u64, len: usize, data_type: DataType) -> Self {
        let context = context.clone();
        Self { address, len, data_type, context, owner: None, element: PhantomData }
    }

    pub(super) fn of_type(
        context: &Context,
        address: u64,
        len: usize,
        data_type: DataType,
        owner: KeepAlive,
    ) -> Self {
        let (context, owner) = (context.clone(), Some(owner));
        Self { address, len, data_type, context, owner, element: PhantomData }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.len * self.data_type.size()
    }

    /// Returns the device address of the first element.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        self.address
    }

    /// Returns the type of the elements (`ncclDataType_t`).
    #[must_use]
    pub fn data_type(&self) -> DataType {
        self.data_type
    }

    /// Returns the context that the memory belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns whether both have bytes in common.
    #[must_use]
    pub fn overlaps<U>(&self, other: &DeviceSlice<U>) -> bool {
        // The bytes of the slice that begins first, and of the other one.
        let (first, last) = if self.address <= other.address {
            (self.byte_len(), other.byte_len())
        } else {
            (other.byte_len(), self.byte_len())
        };
        last > 0 && self.address.abs_diff(other.address) < first as u64
    }

    /// Returns whether an operation can send `self` and receive in `to`: they have no bytes in
    /// common, or `self` begins exactly at element `place` of `to`. `place` is where the operation
    /// allows it to work in place: negative if `self` begins before `to`, and `None` if the
    /// operation has no in-place form.
    #[must_use]
    pub fn is_apart_or_at<U>(&self, to: &DeviceSlice<U>, place: Option<isize>) -> bool {
        let size = self.data_type.size() as u64;
        let is_at = |place: isize| {
            let bytes = (place as i64 as u64).wrapping_mul(size);
            self.address == to.address.wrapping_add(bytes)
        };
        !self.overlaps(to) || place.is_some_and(is_at)
    }

    /// Returns what keeps the memory allocated, if the slice has it.
    pub(crate) fn owner(&self) -> Option<&KeepAlive> {
        self.owner.as_ref()
    }

    /// Returns a reference that keeps the memory allocated, if the slice has one.
    pub(crate) fn keep_alive(&self) -> Option<KeepAlive> {
        self.owner().cloned()
    }

    fn subslice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let len = self.len;
        let start = match range.start_bound() {
            Bound::Included(&start) => Some(start),
            Bound::Excluded(&start) => start.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let end = match range.end_bound() {
            Bound::Included(&end) => end.checked_add(1),
            Bound::Excluded(&end) => Some(end),
            Bound::Unbounded => Some(len),
        };
        match (start, end) {
            (Some(start), Some(end)) if start <= end && end <= len => {
                let address = self.address + (start * self.data_type.size()) as u64;
                Ok(Self { address, len: end - start, ..self.clone() })
            }
            _ => Err(Error::invalid(format!(
                "the range {} is not within memory of {len} elements",
                text_of(&range)
            ))),
        }
    }
}

/// Returns a range as Rust writes it.
fn text_of(range: &impl RangeBounds<usize>) -> String {
    let start = match range.start_bound() {
        Bound::Included(start) => start.to_string(),
        Bound::Excluded(start) => format!("(after {start})"),
        Bound::Unbounded => String::new(),
    };
    match range.end_bound() {
        Bound::Included(end) => format!("{start}..={end}"),
        Bound::Excluded(end) => format!("{start}..{end}"),
        Bound::Unbounded => format!("{start}.."),
    }
}

impl<T> Clone for DeviceSlice<T> {
    fn clone(&self) -> Self {
        let (context, owner) = (self.context.clone(), self.owner.clone());
        Self { context, owner, ..*self }
    }
}

impl<T> std::fmt::Debug for DeviceSlice<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceSlice({:#x}, {} elements of {:?})", self.address, self.len, self.data_type)
    }
}

/// Passed as an address, to a kernel that takes a pointer.
// SAFETY: the bytes refer to no window and no device communicator.
unsafe impl<T: Element> IntoArg<u64> for &DeviceSlice<T> {
    fn into_arg(self) -> u64 {
        self.address
    }
}

/// Passed as address and length, to a kernel that takes `&[T]`.
// SAFETY: the bytes refer to no window and no device communicator.
unsafe impl<T: Element> IntoArg<Slice<T>> for &DeviceSlice<T> {
    fn into_arg(self) -> Slice<T> {
        Slice::new(self.address, self.len)
    }
}
