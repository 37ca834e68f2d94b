//! Setters of optional operands.

/// Setters of a type with the lifetime `'a`, one for
/// each optional buffer. They have its field's name.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $buffer:ident,)*) => {
        $(
            $(#[$doc])*
            pub fn $name(mut self, $name: impl Into<$buffer<'a>>) -> Self {
                self.$name = Some($name.into());
                self
            }
        )*
    };
}
pub(crate) use setters;
